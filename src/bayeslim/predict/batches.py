"""Inputs in parts: how many examples go through a network at once.

A GPU wants many. A CPU is quickest with what stays in its caches, and with tensors that are so small that their memory
is not returned after every layer: of large ones, fetching it again takes longer than a convolution does. What layers
give is guessed from what the first one does. Networks of linear layers give little, and methods that do more than call
networks were not seen to gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, prod
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from bayeslim.blas import IS_ARM
from bayeslim.errors import ShapeMismatch
from bayeslim.stochastic import plain_type
from bayeslim.types import Batches, Inputs, arguments, batch_size, device_of, inputs_of, modules_of, to_device

NUMBERS = {"cuda": (2**23, 2**10), "dense": (2**20, 2**10), "cpu": (3 * 2**19 if IS_ARM else 2**21, 2**4)}
"""As many examples go through a network at once as have so many numbers together, but not fewer than so many: of what
the first layer gives on a CPU, of inputs elsewhere, and for networks of linear layers."""
MOST = 2**14
"""How many examples at most."""
MOVED = 2**30
"""How many bytes of a loader's batches are moved to a GPU once, and not for every network anew."""
FEW = 2**17
"""Inputs of so few numbers are not taken apart."""


def batches_of(x: Any, size: int | Literal["auto"] | None, model: nn.Module, is_called: bool = True) -> Batches:
    """A function that starts a fresh pass over inputs.

    Args:
        x: inputs, or a loader of batches, which is read once.
        size: how many examples at once; None for all, "auto" for as many as suit the device and the network.
        model: what they are for, on whose device they are given.
        is_called: whether it is merely called on them.
    """
    device = device_of(model)
    if _is_loader(x):
        kept = [inputs_of(batch) for batch in x]
        if not kept:
            raise ShapeMismatch("The loader gave no batches: there is nothing to predict.")
        if sum(map(_bytes, kept)) <= MOVED:
            kept = [to_device(inputs, device) for inputs in kept]
        return lambda: (to_device(inputs, device) for inputs in kept)
    x = to_device(x, device)
    total = batch_size(x)
    if not total:
        raise ShapeMismatch("x holds no examples: there is nothing to predict.")
    few = size == "auto" and isinstance(x, Tensor) and x.numel() <= FEW and total <= MOST
    if few or size is None or (size != "auto" and total <= size):
        return lambda: iter([x])
    args, kwargs = arguments(x)
    values = (*args, *kwargs.values())
    if not all(isinstance(v, Tensor) and v.ndim and v.shape[0] == total for v in values):
        return lambda: iter([x])
    step = _suitable(values, model, device.type, is_called) if size == "auto" else size
    if total <= step:
        return lambda: iter([x])
    if size == "auto":
        step = ceil(total / ceil(total / step))  # parts of one size
    return lambda: (_slice(x, slice(start, start + step)) for start in range(0, total, step))


def _bytes(inputs: Inputs) -> int:
    args, kwargs = arguments(inputs)
    return sum(value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _suitable(values: tuple[Tensor, ...], model: nn.Module, device: str, is_called: bool) -> int:
    numbers = sum(value.numel() for value in values) // len(values[0])
    layers = [module for module in modules_of(model) if module._parameters]
    if device == "cuda":
        most, least = NUMBERS["cuda"]
    elif device != "cpu" or not is_called or all(plain_type(layer) in (nn.Linear, nn.BatchNorm1d) for layer in layers):
        most, least = NUMBERS["dense"]
    else:
        most, least = NUMBERS["cpu"]
        numbers = max(numbers, _numbers_given(layers, values[0]))
    return min(max(most // max(numbers, 1), least), MOST)


def _numbers_given(layers: Iterable[Any], x: Tensor) -> int:
    """About how many numbers the first layer that is known gives for an example."""
    numbers = x.numel() // len(x)
    for layer in layers:
        if isinstance(layer, _ConvNd):
            return int(numbers * layer.out_channels / layer.in_channels / prod(layer.stride))
        if isinstance(layer, nn.RNNBase):
            return int(numbers * layer.hidden_size / layer.input_size)
        if isinstance(layer, nn.Linear):
            return int(numbers * layer.out_features / layer.in_features)
        if isinstance(layer, nn.Embedding):
            return numbers * layer.embedding_dim
    return numbers


def _slice(x: Inputs, part: slice) -> Inputs:
    if isinstance(x, Tensor):
        return x[part]
    if isinstance(x, dict):
        return {k: v[part] for k, v in x.items()}
    return tuple(v[part] for v in x)


def _is_loader(x: Any) -> bool:
    """Loaders are iterated; tensors, tuples, mappings and packed sequences are inputs themselves."""
    return not isinstance(x, (Tensor, tuple, list, Mapping)) and hasattr(x, "__iter__")
