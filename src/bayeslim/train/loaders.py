"""What is given in the place of a loader of batches and what to do instead; and how much data a loader has."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, SubsetRandomSampler

from bayeslim.app.data.dataset import Dataset
from bayeslim.types import batch_size, split_batch


def check_loader(loader: Any, name: str = "loader") -> None:
    """Refuse arrays and data sets, which are not made of batches.

    Args:
        loader: what was given.
        name: of the argument.

    Raises:
        TypeError: with what to write instead.
    """
    advice = _advice(loader)
    if advice is not None:
        raise TypeError(f"{name} must give batches of examples. Got {_words(loader)}. Use {advice}.")


def check_inputs(x: Any, name: str = "x") -> None:
    """Refuse arrays of numpy and data sets, which are neither inputs nor a loader of them.

    Args:
        x: what was given.
        name: of the argument.

    Raises:
        TypeError: with what to write instead.
    """
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
    """How many examples a loader goes over, if that can be known without reading it."""
    if isinstance(loader, list):
        return sum(batch_size(split_batch(batch)[0]) for batch in loader)
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, SubsetRandomSampler):  # a part of the data set, which is all the data there is
        return len(sampler)
    dataset: Any = getattr(loader, "dataset", None)
    return len(dataset) if hasattr(dataset, "__len__") else None
