"""Loaders: batches of data in memory, checks of loaders that are given, and the size of their data.

`Loader` keeps its data on the device, and a batch is one gather. The order of epoch e is a permutation drawn from a
generator seeded with (seed, e). It is the same on every device and every rank, and a run that resumes after e epochs
sees the batches that it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, SubsetRandomSampler

from bayeslim.errors import BayeslimError, MissingDataSize, ShapeMismatch
from bayeslim.train.dataset import Dataset
from bayeslim.train.seeding import seed_of_chain
from bayeslim.types import Inputs, batch_size, rows_of, split_batch, to_device

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


def check_loader(loader: Any, name: str = "loader") -> None:
    """Raise if an array or a data set is given, with the call to write instead."""
    advice = _advice(loader)
    if advice is not None:
        raise TypeError(f"{name} must give batches of examples. Got {_words(loader)}. Use {advice}.")


def ignored_class(likelihood: Any) -> int | None:
    """Return the class index of targets that a likelihood leaves out, or None."""
    found: int | None = getattr(likelihood, "ignore_index", None)
    return found


def check_labelled(likelihood: Any, targets: Iterable[Tensor]) -> None:
    """Raise if a likelihood leaves out all targets.

    They are read up to the first batch with one that counts.
    """
    ignored = ignored_class(likelihood)
    if ignored is not None and not any(bool((batch != ignored).any()) for batch in targets):
        raise BayeslimError(
            f"All targets are {ignored}, which Categorical(ignore_index={ignored}) ignores: there is nothing to learn "
            "from. Check the labels, or pass another ignore_index."
        )


def check_inputs(x: Any, name: str = "x") -> None:
    """Raise for an array or a data set in place of inputs, with the call to write."""
    if isinstance(x, (Tensor, tuple)):
        return
    if isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be tensors, or a loader. Got a numpy array. Use torch.from_numpy(...).")
    if isinstance(x, Dataset):
        raise TypeError(f"{name} must be tensors, or a loader. Got a bayeslim Dataset. Use its train_x or test_x.")
    check_loader(x, name)


def _advice(loader: Any) -> str | None:
    if isinstance(loader, Dataset):
        return "bl.data.Loader(dataset.train_x, dataset.train_y, batch_size=128)"
    if isinstance(loader, TorchDataset) and not isinstance(loader, IterableDataset):
        return "torch.utils.data.DataLoader(dataset, batch_size=128, shuffle=True)"
    if isinstance(loader, np.ndarray):
        return "bl.data.Loader(torch.from_numpy(x), torch.from_numpy(y), batch_size=128)"
    if isinstance(loader, Tensor) or (type(loader) is tuple and any(isinstance(part, Tensor) for part in loader)):
        return "bl.data.Loader(x, y, batch_size=128), or [(x, y)] for one batch"
    return None


def _words(loader: Any) -> str:
    if isinstance(loader, np.ndarray):
        return "a numpy array"
    if isinstance(loader, Dataset):
        return "a bayeslim Dataset"
    if isinstance(loader, TorchDataset):
        return f"{type(loader).__name__}, a data set of single examples"
    return "a tensor" if isinstance(loader, Tensor) else "a tuple of tensors"


def size_of_data(loader: Any) -> int | None:
    """Count the examples of a loader, or return None if that needs reading it."""
    if isinstance(loader, list):
        return sum(batch_size(split_batch(batch)[0]) for batch in loader)
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, SubsetRandomSampler):  # only this part of the data set is used
        return len(sampler)
    dataset: Any = getattr(loader, "dataset", None)
    return len(dataset) if hasattr(dataset, "__len__") else None


class TensorPairs:
    """Inputs and targets with equal first dimensions, indexed together.

    Inputs are a tensor, or a tuple or dict of tensors.
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
        return rows_of(self.x, rows), self.y[rows]


def _tensors(x: Inputs) -> list[Tensor]:
    parts = list(x.values()) if isinstance(x, Mapping) else list(x) if isinstance(x, (tuple, list)) else [x]
    for part in parts:
        if not isinstance(part, Tensor) or not part.ndim:
            raise ShapeMismatch(
                f"Inputs must be a tensor, or a tuple or dict of tensors, with a row for each example. "
                f"Got {type(part).__name__}."
            )
    return parts


class Loader:
    """Batches `(inputs, targets)` of tensors in memory.

    Args:
        x: inputs: a tensor, or a tuple or dict of tensors, with a row for each example.
        y: targets, with as many rows.
        batch_size: rows of a batch; the last one may be smaller.
        shuffle: whether each epoch has a new order.
        device: where the data are put, once; by default they stay where they are.
        seed: the seed of the order.
        drop_last: leave out a last batch that is smaller.
        rank: the rank of this process, when `world_size` processes share the data.
        world_size: number of processes. Each sees an equal, disjoint part of the same order, so up to
            `world_size − 1` rows are left out.
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
        """Number of examples this process sees in an epoch, before `drop_last`."""
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

    def side_by_side(self, count: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Go over the next epochs at once, their batches stacked, (count, B, ...)."""
        epochs = range(self.epoch, self.epoch + count)
        self.epoch += count
        orders = torch.stack([self._order(epoch) for epoch in epochs]).to(self.dataset.y.device)
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield self.dataset[orders[:, start : start + self.batch_size]]

    def _order(self, epoch: int) -> Tensor:
        total = len(self.dataset)
        order = torch.arange(total)
        if self.shuffle:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(seed_of_chain(self.seed, epoch)))
        return order[self.rank :: self.world_size][: self.share]

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands: plain numbers, to be saved between epochs."""
        return {"seed": self.seed, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a saved state: the next epoch has the order it would have had."""
        self.seed, self.epoch = int(state["seed"]), int(state["epoch"])

    def __repr__(self) -> str:
        part = f", part {self.rank + 1} of {self.world_size}" if self.world_size > 1 else ""
        return f"Loader: {len(self.dataset):,} examples in {len(self):,} batches of {self.batch_size}{part}"


def training_set_size(bnn: Bayesian, loader: Any) -> int:
    """Return `num_data` where it was given, else the number of examples of the loader.

    Raises:
        MissingDataSize: if neither is known.
    """
    size = None if bnn.num_data_given else size_of_data(loader)
    if size == 0:
        raise BayeslimError("The loader has no examples: there is nothing to learn from.")
    if size is not None:
        return size
    if bnn.num_data is None:
        raise MissingDataSize(
            "The size of the training set is not known from this loader (it has no .dataset with a length). "
            "Pass bayesianize(..., num_data=...)."
        )
    return bnn.num_data


def number_of_batches(loader: Any) -> int:
    """Return the length of a loader, or raise if it has none."""
    try:
        batches = len(loader)
    except TypeError:
        raise BayeslimError(
            "fit needs a loader with a length, to know when an epoch ends. Got one without. "
            "Use a DataLoader over a dataset with a length, or train in your own loop with bnn.loss."
        ) from None
    if not batches:
        raise BayeslimError("The loader has no batches: there is nothing to train on.")
    return batches
