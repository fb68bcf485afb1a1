"""The prior precision δ of a Normal prior N(m, 1/δ): one number, one a layer, one a parameter, or one a weight.

A mapping is keyed by parameter names ("fc1.weight") or layer names ("fc1", for all of the layer's parameters); a
parameter's own entry wins over its layer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from bayeslim.errors import ShapeMismatch, closest
from bayeslim.types import Params

PriorPrecision: TypeAlias = float | Tensor | Mapping[str, float | Tensor]
"""A precision for everything, or precisions by parameter or layer name."""


def resolve(prior_precision: PriorPrecision, mean: Mapping[str, Tensor]) -> Params:
    """Find the precision of each parameter: a scalar, or a tensor that broadcasts.

    Parameters that share an entry get the same tensor object, which shows that they share it.

    Raises:
        ShapeMismatch: for a parameter without a precision, a precision without a parameter, or shapes that do not fit.
        ValueError: for a negative or non-finite precision.
    """
    if not isinstance(prior_precision, Mapping):
        shared = _checked("all parameters", prior_precision)
        found = dict.fromkeys(mean, shared)
    else:
        layers = {name.rpartition(".")[0] for name in mean}
        for key in prior_precision:
            if key not in mean and key not in layers:
                raise ShapeMismatch(
                    f'The prior precision of "{key}" belongs to no parameter and no layer. '
                    f"Closest names: {closest(key, (*mean, *layers)) or ', '.join(list(mean)[:3])}."
                )
        entries = {key: _checked(f'"{key}"', value) for key, value in prior_precision.items()}
        found = {}
        for name in mean:
            key = name if name in entries else name.rpartition(".")[0]
            if key not in entries:
                raise ShapeMismatch(
                    f'No prior precision for "{name}". Add it under its own name or its layer\'s, '
                    "or pass one number for all."
                )
            found[name] = entries[key]
    for name, value in mean.items():
        if found[name].numel() != 1 and not _fits(found[name].shape, value.shape):
            raise ShapeMismatch(
                f'The prior precision of "{name}" must be a scalar or broadcast to {tuple(value.shape)}. '
                f"Got shape {tuple(found[name].shape)}."
            )
    return found


def diagonal(resolved: Mapping[str, Tensor], mean: Mapping[str, Tensor], like: Tensor) -> Params:
    """Expand resolved precisions to the parameters' shapes, as tensors like `like`."""
    return {
        name: (resolved[name].reshape(()) if resolved[name].numel() == 1 else resolved[name])
        .to(like)
        .expand(value.shape)
        for name, value in mean.items()
    }


def to_tensors(prior_precision: PriorPrecision) -> Params:
    """Write a prior precision as named tensors, for saving."""
    if not isinstance(prior_precision, Mapping):
        return {"prior": _tensor(prior_precision).detach().contiguous()}
    return {f"prior:{key}": _tensor(value).detach().contiguous() for key, value in prior_precision.items()}


def from_tensors(tensors: Mapping[str, Tensor]) -> PriorPrecision:
    """Read a prior precision from named tensors; others are ignored."""
    if "prior" in tensors:
        return tensors["prior"]
    return {key.removeprefix("prior:"): value for key, value in tensors.items() if key.startswith("prior:")}


def _tensor(value: float | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


def _checked(what: str, value: float | Tensor) -> Tensor:
    tensor = _tensor(value)
    if not bool(torch.isfinite(tensor).all()) or bool((tensor < 0).any()):
        raise ValueError(f"The prior precision of {what} must be finite and not negative. Got {value}.")
    return tensor


def _fits(shape: torch.Size, target: torch.Size) -> bool:
    """Tell whether a tensor of `shape` expands to `target`."""
    return len(shape) <= len(target) and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False)
    )
