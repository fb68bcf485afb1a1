"""Seeds of a run: the global generators, and the order of a loader's data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from bayeslim.noise import kept_random_state

CHAIN_SEED_STRIDE = 0x9E3779B97F4A7C15
"""The difference between the seeds of two chains: large and odd, so that runs with neighbouring seeds share none."""


@contextmanager
def seeded(seed: int | None, rank: int, loader: Any = None) -> Iterator[None]:
    """Seed the generators and a loader's order of data inside; None changes nothing.

    Every rank has its own seed of the generators of torch, Python and numpy. The loader's `generator`, or the "seed"
    and "epoch" of its `state_dict()`, are the same on every rank. All is restored on exit.
    """
    if seed is None:
        yield
        return
    with kept_random_state(), _ordered(loader, seed):
        torch.manual_seed(seed + rank)
        random.seed(seed + rank)
        np.random.seed((seed + rank) % 2**32)  # noqa: NPY002 - augmentations may use it
        yield


def seed_of_chain(seed: int, index: int) -> int:
    """Return a seed for one chain of a run."""
    return (seed + index * CHAIN_SEED_STRIDE) % 2**63


def ordered_by(loader: Any, seed: int) -> AbstractContextManager[None]:
    """Seed the generators and the order of a loader's data, alike on every rank."""
    return seeded(seed, 0, loader)


def has_state(loader: Any) -> bool:
    """Tell whether a loader can return its state, and restore it.

    Those of Accelerate always have the methods, but they only work if the loader inside has them.
    """
    inner = getattr(loader, "base_dataloader", loader)
    return hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict")


@contextmanager
def _ordered(loader: Any, seed: int) -> Iterator[None]:
    """Start the order of a loader's data from a seed inside."""
    generator = getattr(loader, "generator", None)
    generator = generator if isinstance(generator, torch.Generator) else None
    own = loader.state_dict() if has_state(loader) else None
    before = generator.get_state() if generator is not None else None
    if generator is not None:
        generator.manual_seed(seed)
    if own is not None and {"seed", "epoch"} <= own.keys():
        loader.load_state_dict({**own, "seed": seed, "epoch": 0})
    try:
        yield
    finally:
        if generator is not None and before is not None:
            generator.set_state(before)
        if own is not None:
            loader.load_state_dict(own)
