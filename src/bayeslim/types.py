"""Shared types: parameters by name, inputs, batches; and calls of models on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from bayeslim.errors import BayeslimError, ShapeMismatch, UnsupportedModel

Params: TypeAlias = dict[str, Tensor]
"""Tensors by the user's own parameter names, as in `model.named_parameters()`, never prefixed."""

Inputs: TypeAlias = Any
"""Arguments of a model: a tensor (or any single object), a tuple of arguments, or a dict of keyword arguments."""

Batch: TypeAlias = Any
"""Inputs with targets: `(x, y)`, `(x1, x2, ..., y)`, or a dict with one of the keys in `TARGET_KEYS`."""

Batches: TypeAlias = Callable[[], Iterator[Inputs]]
"""Inputs in parts, on the network's device: a function that starts a pass over them."""

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


def split_batch(batch: Batch) -> tuple[Inputs, Tensor]:
    """Take a batch apart into inputs and targets.

    >>> split_batch((1, 2))
    (1, 2)
    >>> split_batch((1, 2, 3))
    ((1, 2), 3)
    >>> split_batch({"pixels": 1, "labels": 2})
    ({'pixels': 1}, 2)
    """
    if isinstance(batch, Mapping):
        for key in TARGET_KEYS:
            if key in batch:
                return {k: v for k, v in batch.items() if k != key}, batch[key]
        raise ShapeMismatch(
            f"A batch given as a dict needs its targets under one of {', '.join(TARGET_KEYS)}. "
            f"Got the keys {', '.join(map(str, batch))}. Rename one, or yield (inputs, targets) tuples."
        )
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, (tuple, list)) and len(batch) > 2:
        return tuple(batch[:-1]), batch[-1]
    raise ShapeMismatch(
        f"A batch must be (inputs, targets) or a dict with targets. Got {type(batch).__name__}"
        f"{f' of length {len(batch)}' if isinstance(batch, (tuple, list)) else ''}."
    )


def inputs_of(batch: Any) -> Inputs:
    """Return the inputs of a batch, which may have targets or none.

    >>> inputs_of((1, 2)), inputs_of((1,)), inputs_of({"pixels": 1})
    (1, 1, {'pixels': 1})
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0]
    if isinstance(batch, Tensor | np.ndarray) or (isinstance(batch, Mapping) and not batch.keys() & set(TARGET_KEYS)):
        return batch
    return split_batch(batch)[0]


def call(model: nn.Module, inputs: Inputs, params: Mapping[str, Tensor] | None = None) -> Tensor:
    """Call `model` on tensor, tuple or dict inputs, with other parameters if given."""
    args, kwargs = arguments(inputs)
    if params:
        return as_tensor(call_with(model, params, args, kwargs), model)
    return as_tensor(model(*args, **kwargs), model)


def fitting(model: nn.Module, params: Mapping[str, Tensor]) -> Params:
    """Convert weights to the model's dtypes: posteriors may have a higher precision."""
    return {name: value.to(model.get_parameter(name).dtype) for name, value in params.items()}


def call_with(model: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a model with other parameters and buffers, by `functional_call`.

    Tied tensors are given under all their names: torch's own tying sets a module that has two names twice, and then
    fails to restore its tensors.
    """
    names: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                names.setdefault(tensor, []).append(f"{path}.{leaf}" if path else leaf)
    given = dict(tensors)
    for tied in names.values():
        if len(tied) > 1:
            value = next((given[name] for name in tied if name in given), None)
            if value is not None:
                given.update(dict.fromkeys(tied, value))
    return functional_call(model, given, args, dict(kwargs), tie_weights=False)


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split inputs into positional and keyword arguments; a named tuple is one."""
    if type(inputs) in (tuple, list):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,), {}


def as_tensor(output: Any, model: nn.Module) -> Tensor:
    """Find the tensor in a model's output: the output itself, or its `logits`."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise UnsupportedModel(
        f"{type(model).__name__} must return a tensor (or an object with .logits). Got {type(output).__name__}. "
        "Wrap it in a module whose forward returns the tensor that the likelihood reads."
    )


def to_device(data: Any, device: torch.device | str | None) -> Any:
    """Move every tensor in a batch to `device`."""
    if device is None or (isinstance(data, Tensor) and data.device == device):
        return data
    if isinstance(data, Mapping):
        return {k: to_device(v, device) for k, v in data.items()}
    if type(data) in (tuple, list):
        return tuple(to_device(v, device) for v in data)
    return data.to(device, non_blocking=True) if hasattr(data, "to") else data


def as_tensors(inputs: Any, model: nn.Module) -> Any:
    """Turn NumPy arrays among inputs into tensors.

    Real numbers take the dtype of the network's parameters. Tensors and all other objects stay as they are.
    """
    if isinstance(inputs, np.ndarray):
        if inputs.dtype.kind not in "biuf":
            raise TypeError(
                f"NumPy inputs must be arrays of numbers. Got {inputs.dtype}. Convert them first, for example with "
                "array.astype(np.float32)."
            )
        tensor = torch.from_numpy(np.array(inputs))  # a copy: arrays may be read-only, or have negative strides
        if not tensor.is_floating_point():
            return tensor
        dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
        return tensor.to(next(dtypes, torch.get_default_dtype()))
    if isinstance(inputs, Mapping):
        return {key: as_tensors(value, model) for key, value in inputs.items()}
    if type(inputs) in (tuple, list):
        return type(inputs)(as_tensors(value, model) for value in inputs)
    return inputs


def flattened(tensor: Tensor, lead: int) -> Tensor:
    """Flatten what follows the first `lead` dimensions.

    Behind them may be a scalar parameter, which has one entry and no dimension.

    >>> flattened(torch.ones(5, 2, 3), 1).shape, flattened(torch.ones(5), 1).shape
    (torch.Size([5, 6]), torch.Size([5, 1]))
    """
    return tensor.unsqueeze(-1).flatten(lead)


def batch_size(inputs: Inputs) -> int:
    """Count the examples: the first dimension of the first tensor in the inputs."""
    if isinstance(inputs, Tensor) and inputs.ndim:
        return inputs.shape[0]
    if isinstance(inputs, nn.utils.rnn.PackedSequence):
        return int(inputs.batch_sizes[0])
    args, kwargs = arguments(inputs)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim:
            return value.shape[0]
        if isinstance(value, nn.utils.rnn.PackedSequence):
            return int(value.batch_sizes[0])
    given = ", ".join(sorted({type(value).__name__ for value in (*args, *kwargs.values())}))
    hint = "Use torch.as_tensor(...)." if "ndarray" in given else (
        "Pass a tensor with examples first, a tuple or dict of such, or a loader of batches, such as a DataLoader; "
        "a list is taken for the arguments of one call."
    )  # fmt: skip
    raise ShapeMismatch(f"The inputs hold no tensor with a batch dimension. Got {given or 'nothing'}. {hint}")


def with_batch_size(inputs: Inputs, size: int) -> Inputs:
    """Cut or repeat examples to another batch size."""
    rows = batch_size(inputs)
    if not rows:
        raise ShapeMismatch("The example has no rows. Pass at least one.")

    def resize(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.ndim and x.shape[0] == rows):
            return x
        return x.repeat(-(-size // rows), *(1 for _ in x.shape[1:]))[:size].clone()

    return tree_map(resize, inputs)


def rows_of(inputs: Inputs, rows: Any) -> Inputs:
    """Select examples of a tensor, or of a tuple, list or dict of tensors."""
    if isinstance(inputs, Mapping):
        return {key: value[rows] for key, value in inputs.items()}
    return tuple(value[rows] for value in inputs) if isinstance(inputs, (tuple, list)) else inputs[rows]


def note_inputs(error: Exception, model: nn.Module, inputs: Any) -> None:
    """Add the shapes of the inputs and of the first parameter to an error of torch."""
    if isinstance(error, BayeslimError) or not isinstance(inputs, (Tensor, tuple, Mapping)):
        return
    args, kwargs = arguments(inputs)
    shapes = [f"{tuple(v.shape)}, {v.dtype}" for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    name, weight = next(((name, p) for name, p in model.named_parameters()), ("", None))
    if shapes and weight is not None:
        error.add_note(
            f"The network was given inputs of {' and '.join(shapes)}; its first parameter, {name}, is of "
            f"{tuple(weight.shape)}, {weight.dtype}. Give inputs such as its first layer takes, examples first."
        )


def misfit(error: Exception) -> ShapeMismatch | None:
    """Translate torch's error about inputs that do not fit a layer; None for others."""
    notes = " ".join(getattr(error, "__notes__", ()))
    found = re.search(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", str(error))
    if found:
        return ShapeMismatch(f"A linear layer takes {found[2]} features, and was given {found[1]}. {notes}")
    found = re.search(r"to have (\d+) channels, but got (\d+) channels", str(error))
    return (
        ShapeMismatch(f"A convolution takes {found[1]} channels, and was given {found[2]}. {notes}") if found else None
    )


def chosen_device(device: torch.device | str) -> torch.device:
    """Find a device by its name; "auto" is a GPU if there is one.

    Raises:
        ValueError: for names that torch does not know, devices that are not here, and the meta device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        known = '"auto", or a device of torch, such as "cpu" or "cuda:0"'
        raise ValueError(f"device must be {known}. Got {device!r}.") from error
    check_device(lambda number: number.to(chosen), f'device="{chosen}"')
    return chosen


def check_device(move: Callable[[Tensor], Tensor], what: str) -> None:
    """Raise if a tensor cannot be moved, or loses its values on the way."""
    remedy = 'Use "cpu", or "cuda" where torch finds a GPU.'
    try:
        moved = move(torch.zeros(()))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"{what} is not available here: {reason}. {remedy}") from error
    if moved.is_meta:
        raise ValueError(f"{what} is the meta device, where tensors have no values. {remedy}")


def device_of(model: nn.Module) -> torch.device:
    """Find the device of a model's first parameter or buffer; without any, the CPU."""
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))
