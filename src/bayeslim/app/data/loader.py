"""A loader for data that fit in memory: they stay on the device, and a batch is one gather.

The order of epoch e is a permutation drawn from a generator seeded with (seed, e), so it is the same on every device
and every rank, and a run that is resumed after e epochs sees the batches of a run that was never stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bayeslim.errors import ShapeMismatch
from bayeslim.types import Inputs, to_device


class TensorPairs:
    """Inputs and targets with equal first dimensions, indexed together.

    Args:
        x: a tensor, or a tuple or dict of tensors.
        y: the targets.
    """

    def __init__(self, x: Inputs, y: Tensor):
        sizes = [len(tensor) for tensor in _tensors(x)]
        if not sizes or any(size != len(y) for size in sizes):
            raise ShapeMismatch(
                f"Every input needs as many rows as there are targets, {len(y)}. Got inputs with {sizes} rows."
            )
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: int | slice | Tensor) -> tuple[Inputs, Tensor]:
        return _take(self.x, rows), self.y[rows]


def _tensors(x: Inputs) -> list[Tensor]:
    parts = list(x.values()) if isinstance(x, Mapping) else list(x) if isinstance(x, (tuple, list)) else [x]
    for part in parts:
        if not isinstance(part, Tensor) or not part.ndim:
            raise ShapeMismatch(
                f"Inputs must be a tensor, or a tuple or dict of tensors, with a row for each example. "
                f"Got {type(part).__name__}."
            )
    return parts


def _take(x: Inputs, rows: Any) -> Inputs:
    if isinstance(x, Mapping):
        return {key: value[rows] for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return tuple(value[rows] for value in x)
    return x[rows]


class Loader:
    """Batches `(inputs, targets)` of tensors in memory.

    Args:
        x: inputs: a tensor, or a tuple or dict of tensors, with a row for each example.
        y: targets, with as many rows.
        batch_size: rows of a batch; the last one may be smaller.
        shuffle: whether each epoch has a new order.
        device: where the data are put, once; by default they stay where they are.
        seed: of the order.
        drop_last: leave out a last batch that is smaller.
        rank: which part this process sees, when `world_size` processes share the data.
        world_size: the number of processes. Each sees an equal, disjoint part of the same order, so up to
            `world_size − 1` rows of it are left out.
    """

    def __init__(
        self,
        x: Inputs,
        y: Tensor,
        batch_size: int = 128,
        shuffle: bool = True,
        *,
        device: torch.device | str | None = None,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1. Got {batch_size}.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0 ... world_size - 1. Got rank={rank}, world_size={world_size}.")
        self.dataset = TensorPairs(to_device(x, device), to_device(y, device))
        if len(self.dataset) < world_size:
            raise ValueError(f"{world_size} processes cannot share {len(self.dataset)} examples.")
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch = 0

    @property
    def share(self) -> int:
        """The number of examples that this process sees in an epoch, before `drop_last`."""
        return len(self.dataset) // self.world_size

    def __len__(self) -> int:
        """Count the batches of an epoch."""
        return self.share // self.batch_size if self.drop_last else -(-self.share // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._batches(epoch)

    def _batches(self, epoch: int) -> Iterator[tuple[Inputs, Tensor]]:
        starts = range(0, len(self) * self.batch_size, self.batch_size)
        if not self.shuffle and self.world_size == 1:
            for start in starts:  # slices share the data's memory
                yield self.dataset[start : start + self.batch_size]
            return
        order = self._order(epoch).to(self.dataset.y.device)
        for start in starts:
            yield self.dataset[order[start : min(start + self.batch_size, self.share)]]

    def _order(self, epoch: int) -> Tensor:
        total = len(self.dataset)
        order = torch.randperm(total, generator=_generator(self.seed, epoch)) if self.shuffle else torch.arange(total)
        return order[self.rank :: self.world_size][: self.share]

    def state_dict(self) -> dict[str, int]:
        """Return the loader's state, plain numbers to be saved between epochs."""
        return {"seed": self.seed, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a saved state: the next epoch has the order it would have had."""
        self.seed, self.epoch = int(state["seed"]), int(state["epoch"])

    def __repr__(self) -> str:
        part = f", part {self.rank + 1} of {self.world_size}" if self.world_size > 1 else ""
        return f"Loader: {len(self.dataset):,} examples in {len(self):,} batches of {self.batch_size}{part}"


def _generator(seed: int, epoch: int) -> torch.Generator:
    """Build the generator of an epoch; a large odd stride separates the epochs of neighbouring seeds."""
    return torch.Generator().manual_seed((seed + epoch * 0x9E3779B97F4A7C15) % 2**63)
