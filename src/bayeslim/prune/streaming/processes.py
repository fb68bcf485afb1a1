"""Several processes that cut one network together: who solves what, and how the others get it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bayeslim.posteriors.conjugate import Solve
from bayeslim.train.distributed import rank_and_world
from bayeslim.types import device_of


def owners(costs: Sequence[float]) -> list[int]:
    """Share tasks out between processes, each to the least busy one.

    Returns:
        the rank of each task.
    """
    _, world = rank_and_world()
    load = [0.0] * world
    found = [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda task: -costs[task]):
        found[task] = load.index(min(load))
        load[found[task]] += costs[task]
    return found


def send(tensor: Tensor, source: int) -> None:
    """Copy a tensor from one process to all others, in place."""
    if rank_and_world()[1] > 1:
        dist.broadcast(tensor, source)


def send_solve(solve: Solve | None, source: int, device: torch.device) -> Solve:
    """Copy the report of a solve from one process to all others."""
    if rank_and_world()[1] == 1:
        assert solve is not None
        return solve
    values = [0.0] * 4
    if solve is not None:
        values = [float(solve.how == "joint"), float(solve.iterations), solve.residual, float(solve.converged)]
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    send(packed, source)
    joint, iterations, residual, converged = packed.tolist()
    return Solve("joint" if joint else "row", int(iterations), residual, bool(converged))


def least(count: int, model: nn.Module) -> int:
    """Find the smallest of the processes' counts."""
    if rank_and_world()[1] > 1:
        smallest = torch.tensor(count, device=device_of(model))
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)
    return count
