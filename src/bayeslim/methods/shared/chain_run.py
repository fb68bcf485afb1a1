"""A chain as a training run of one process, and the networks that ranks exchange at the end."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError
from bayeslim.posteriors.particles import Particles
from bayeslim.results import Fit
from bayeslim.train.checkpoints import Checkpoint
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.fit import TrainingRun
from bayeslim.train.loaders import number_of_batches, training_set_size
from bayeslim.types import chosen_device


def prepare(bnn: Bayesian, loader: Any, accumulate: int, device: torch.device | str | None) -> int:
    """Set the network's data size and device; return the optimizer steps of an epoch."""
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1. Got {accumulate}.")
    check_whole(loader)
    batches, num_data = number_of_batches(loader), training_set_size(bnn, loader)
    if device is not None:
        bnn.to(chosen_device(device))
    bnn.num_data, bnn.steps_per_epoch = num_data, math.ceil(batches / accumulate)
    return bnn.steps_per_epoch


def check_whole(loader: Any) -> None:
    """Raise if a loader gives every rank only a part of the data."""
    shared_out = hasattr(getattr(loader, "sampler", None), "set_epoch") or getattr(loader, "world_size", 1) > 1
    if shared_out and rank_and_world()[1] > 1:
        raise BayeslimError(
            "Every rank runs chains of its own, on all the data. Pass a loader that is not shared out between ranks."
        )


def run_alone(
    bnn: Bayesian,
    loader: Any,
    optimizer: torch.optim.Optimizer,
    factor: Callable[[float], float],
    *,
    epochs: int,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **training: Any,
) -> Fit:
    """Train in this process alone; arguments as in `bayeslim.train.fit`."""
    unknown = training.keys() - {"validate", "callbacks", "accumulate", "clip", "autocast", "compile"}
    if unknown:
        raise TypeError(f"A run with a learning rate of its own takes no {', '.join(sorted(unknown))}.")
    bnn.count_steps_of(optimizer)
    saved = None if checkpoint is None else Checkpoint(checkpoint, loader)
    shown = progress and rank_and_world()[0] == 0
    run = TrainingRun(bnn, loader, optimizer, epochs, factor, checkpoint=saved, shown=shown, **training)
    with warnings.catch_warnings():
        # chains must not be averaged
        warnings.filterwarnings("ignore", message=".*without a DistributedDataParallel wrapper")
        return run.run()


def joined(particles: Sequence[Particles]) -> Particles:
    """Join the networks of several chains, as many of the last as the shortest has."""
    if len(particles) == 1:
        return particles[0]
    count = min(each.count for each in particles)
    values, buffers = (
        {name: torch.cat([getattr(each, part)[name][-count:] for each in particles]) for name in first}
        for part, first in (("values", particles[0].values), ("buffers", particles[0].buffers))
    )
    return Particles(values, buffers=buffers, chains=len(particles))


def between_ranks(particles: Particles) -> Particles:
    """Gather the networks of all ranks on every rank, equally many of each chain."""
    _, world = rank_and_world()
    if world == 1:
        return particles
    each = torch.tensor(particles.count // particles.chains, device=next(iter(particles.values.values())).device)
    torch.distributed.all_reduce(each, torch.distributed.ReduceOp.MIN)
    last = int(each)

    def shared(tensor: Tensor) -> Tensor:
        by_chain = tensor.unflatten(0, (particles.chains, -1))[:, -last:]
        return _gathered(by_chain.flatten(0, 1), world)

    return Particles(
        {name: shared(value) for name, value in particles.values.items()},
        buffers={name: shared(value) for name, value in particles.buffers.items()},
        chains=particles.chains * world,
    )


def _gathered(value: Tensor, world: int) -> Tensor:
    parts = [torch.empty_like(value) for _ in range(world)]
    torch.distributed.all_gather(parts, value.contiguous())
    return torch.cat(parts)
