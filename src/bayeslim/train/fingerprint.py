"""A fingerprint of data: a hash of their tensors, where these can be read without drawing from a loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, SubsetRandomSampler, TensorDataset

from bayeslim.io.digest import digest
from bayeslim.train.loaders import TensorPairs

MAX_BYTES_HASHED = 64 * 2**20
"""Larger tensors are hashed by evenly spread rows."""


def fingerprint(loader: Any) -> str | None:
    """Hash the data of a loader; None if they are not tensors in memory.

    It reads `bayeslim.data.Loader`, lists of batches, and loaders of a `TensorDataset` or of a part of one. The order
    of rows counts, the order of an epoch does not. Transformations by a loader are not seen. Of large tensors, evenly
    spread rows are hashed.
    """
    content = _content(loader)
    if content is None:
        return None
    parts = list(_parts(content))
    share = MAX_BYTES_HASHED // max(1, sum(isinstance(part, Tensor) for part in parts))
    shapes = [str(tuple(part.shape)) for part in parts if isinstance(part, Tensor)]
    rows = [_some_rows(part, share) if isinstance(part, Tensor) else part for part in parts]
    return digest([*shapes, *rows])[:16]


def layout(value: Any) -> str:
    """Describe shapes, dtypes and nesting of the tensors in inputs."""
    return ", ".join(
        f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else part for part in _parts(value)
    )


def is_batches(value: Any) -> bool:
    """Check whether it is a list of batches, which are tuples, lists or dicts."""
    return isinstance(value, list) and bool(value) and all(isinstance(b, (tuple, list, Mapping)) for b in value)


def _content(loader: Any) -> list[Any] | None:
    if is_batches(loader):
        return list(loader)
    dataset, rows = getattr(loader, "dataset", None), []
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, SubsetRandomSampler):
        rows.append(sampler.indices)
    while isinstance(dataset, Subset):
        rows.append(dataset.indices)
        dataset = dataset.dataset
    if isinstance(dataset, TensorPairs):
        return [dataset.x, dataset.y, *map(torch.as_tensor, rows)]
    if isinstance(dataset, TensorDataset):
        return [*dataset.tensors, *map(torch.as_tensor, rows)]
    return None


def _parts(value: Any) -> Iterator[Tensor | str]:
    """Yield the tensors in nested lists and dicts.

    Strings stand for the nesting and for values that are not tensors.
    """
    if isinstance(value, Tensor) and value.layout == torch.strided:
        yield value.detach()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _parts(item)
    elif isinstance(value, (tuple, list)):
        yield f"{len(value)} parts"
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


def _some_rows(tensor: Tensor, share: int) -> Tensor:
    """Take evenly spread rows of a tensor that has more bytes than its share."""
    every = -(-tensor.numel() * tensor.element_size() // share)
    return tensor[::every] if tensor.ndim and every > 1 else tensor
