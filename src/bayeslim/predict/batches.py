"""Inputs in chunks, so that the memory of a prediction does not grow with the number of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from bayeslim.errors import ShapeMismatch
from bayeslim.types import (
    Batches,
    Inputs,
    arguments,
    as_tensors,
    batch_size,
    device_of,
    inputs_of,
    rows_of,
    to_device,
)

MAX_NUMBERS_PER_CHUNK = {"cpu": 2**21, "cuda": 2**26}
"""Numbers in the inputs of a chunk, or in the outputs of the first layer if these are more. A CPU gains from
activations that stay in its caches, a GPU from large ones."""

MIN_EXAMPLES_PER_CHUNK, MAX_EXAMPLES_PER_CHUNK = 2**4, 2**14

MAX_BYTES_KEPT_ON_DEVICE = 2**30
"""Bytes of a loader's batches that are moved to the device once, and not anew for every network."""


def batches_of(x: Any, size: int | Literal["auto"] | None, model: nn.Module) -> Batches:
    """Make a function that starts a fresh pass over inputs, on the model's device.

    A loader of batches is read once. `size` is the number of examples in a chunk: None for all, "auto" for as many as
    keep memory bounded.
    """
    device = device_of(model)
    if _is_loader(x):
        kept = [as_tensors(inputs_of(batch), model) for batch in x]
        if not kept:
            raise ShapeMismatch("The loader gave no batches: there is nothing to predict.")
        if sum(map(_bytes, kept)) <= MAX_BYTES_KEPT_ON_DEVICE:
            kept = [to_device(inputs, device) for inputs in kept]
        return lambda: (to_device(inputs, device) for inputs in kept)
    x = to_device(x, device)
    total = batch_size(x)
    if not total:
        raise ShapeMismatch("x holds no examples: there is nothing to predict.")
    args, kwargs = arguments(x)
    values = (*args, *kwargs.values())
    if size is None or not all(isinstance(v, Tensor) and v.ndim and v.shape[0] == total for v in values):
        return lambda: iter([x])
    step = _examples_per_chunk(values, model, device.type) if size == "auto" else size
    if total <= step:
        return lambda: iter([x])
    if size == "auto":
        step = ceil(total / ceil(total / step))  # chunks of one size
    return lambda: (rows_of(x, slice(start, start + step)) for start in range(0, total, step))


def _examples_per_chunk(values: tuple[Tensor, ...], model: nn.Module, device: str) -> int:
    numbers = sum(value.numel() for value in values) // len(values[0])
    growth = next((ratio for ratio in map(_growth, model.modules()) if ratio is not None), 1.0)
    numbers = max(numbers, int(numbers * growth))
    most = MAX_NUMBERS_PER_CHUNK.get(device, MAX_NUMBERS_PER_CHUNK["cuda"]) // max(numbers, 1)
    return min(max(most, MIN_EXAMPLES_PER_CHUNK), MAX_EXAMPLES_PER_CHUNK)


def _growth(layer: Any) -> float | None:
    """Compute a layer's output size over its input size; None for unknown types."""
    if isinstance(layer, _ConvNd):
        return layer.out_channels / layer.in_channels / prod(layer.stride)
    if isinstance(layer, nn.RNNBase):
        return layer.hidden_size / layer.input_size
    if isinstance(layer, nn.Linear):
        return layer.out_features / layer.in_features
    return float(layer.embedding_dim) if isinstance(layer, nn.Embedding) else None


def _bytes(inputs: Inputs) -> int:
    args, kwargs = arguments(inputs)
    return sum(value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _is_loader(x: Any) -> bool:
    """Check whether `x` is a loader, rather than a tensor or a container of inputs."""
    return not isinstance(x, (Tensor, tuple, list, Mapping)) and hasattr(x, "__iter__")
