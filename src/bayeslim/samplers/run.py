"""One process, one chain: a training run that no other rank has a part in, and what the ranks share at the end."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayeslim.errors import BayeslimError
from bayeslim.posteriors.particles import Particles
from bayeslim.results import Fit
from bayeslim.train import fit as train
from bayeslim.train.checkpoints import Checkpoint

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian

STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of two chains: large and odd, so that chains of neighbouring seeds stay apart."""


def rank_and_world() -> tuple[int, int]:
    """Which process this is, of how many."""
    return train._rank_and_world()


def seed_of_chain(seed: int, index: int) -> int:
    """A seed of its own for every chain of a run."""
    return (seed + index * STRIDE) % 2**63


def prepare(bnn: Bayesian, loader: Any, accumulate: int, device: torch.device | str | None) -> int:
    """Tell the network of its data; returns the optimizer steps of an epoch."""
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1. Got {accumulate}.")
    check_whole(loader)
    batches, num_data = train._length(loader), train._num_data(bnn, loader)
    if device is not None:
        bnn.to("cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device)
    bnn.num_data, bnn.steps_per_epoch = num_data, math.ceil(batches / accumulate)
    return bnn.steps_per_epoch


def check_whole(loader: Any) -> None:
    """Refuse a loader that gives every rank a part of the data."""
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
    validate: Any = None,
    callbacks: Sequence[train.Callback] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
    progress: bool = True,
) -> Fit:
    """A training run in this process alone, whatever other ranks do; arguments as of `bayeslim.train.fit`."""
    bnn.count_steps_of(optimizer)
    run = train._Run(
        bnn, loader, optimizer, epochs, factor, validate, "val_nll", None, tuple(callbacks), accumulate, clip,
        autocast, Checkpoint(checkpoint) if checkpoint is not None else None, 0, 1, train._length(loader),
        progress and rank_and_world()[0] == 0,
    )  # fmt: skip
    with warnings.catch_warnings():
        # chains are not to be averaged
        warnings.filterwarnings("ignore", message=".*without a DistributedDataParallel wrapper")
        return run.run()


@contextmanager
def ordered_by(loader: Any, seed: int) -> Iterator[None]:
    """All that is random inside follows from a seed, the order of the data too, and is as it was afterwards."""
    generator = getattr(loader, "generator", None)
    generator = generator if isinstance(generator, torch.Generator) else None
    own = loader.state_dict() if hasattr(loader, "load_state_dict") and hasattr(loader, "state_dict") else None
    before = generator.get_state() if generator is not None else None
    if generator is not None:
        generator.manual_seed(seed)
    if own is not None and {"seed", "epoch"} <= own.keys():
        loader.load_state_dict({**own, "seed": seed, "epoch": 0})
    try:
        with train._seeded(seed, 0):
            yield
    finally:
        if generator is not None and before is not None:
            generator.set_state(before)
        if own is not None:
            loader.load_state_dict(own)


def joined(particles: Sequence[Particles]) -> Particles:
    """The networks of several chains, one chain after the other; the last of each, where some have fewer."""
    if len(particles) == 1:
        return particles[0]
    count = min(each.count for each in particles)
    values, buffers = (
        {name: torch.cat([getattr(each, part)[name][-count:] for each in particles]) for name in first}
        for part, first in (("values", particles[0].values), ("buffers", particles[0].buffers))
    )
    return Particles(values, buffers=buffers, chains=len(particles))


def between_ranks(particles: Particles) -> Particles:
    """The networks of all ranks, on every one of them; equally many of each chain."""
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
