"""Rules for operations that move elements, and for pooling; see `rules` for their approximations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslim.predict.moments.tensor import Moments, NoRule, rule

_UNMOVED = ("flatten", "view", "reshape", "contiguous", "clone", "detach", "squeeze", "to", "float", "double")


@rule(
    *_UNMOVED,
    *("unsqueeze", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "unflatten"),
    *("__getitem__", "select", "narrow", "index_select", "chunk", "split", "unbind", "flip", "roll"),
    *("expand", "repeat", "tile", "repeat_interleave", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
)
def _moved(func: Any, x: Moments, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Moments):
        raise NoRule(f"{func.__name__} is given a random tensor as its argument")
    x = x.settled()
    mean, variance = func(x.mu, *args, **kwargs), func(x.sigma2, *args, **kwargs)
    if isinstance(mean, (tuple, list)):
        return tuple(Moments.of(m, v, x.sources) for m, v in zip(mean, variance, strict=True))
    in_place = mean.shape == x.mu.shape and func.__name__ in _UNMOVED
    return Moments.of(mean, variance, x.sources, x.common if in_place and mean.dtype == x.mu.dtype else None)


@rule("cat", "concat", "concatenate", "stack", "hstack", "vstack")
def _joined(func: Any, tensors: Any, *args: Any, **kwargs: Any) -> Moments:
    settled = [t.settled() if isinstance(t, Moments) else t for t in tensors]
    means = [t.mu if isinstance(t, Moments) else t for t in settled]
    variances = [t.sigma2 if isinstance(t, Moments) else torch.zeros_like(t) for t in settled]
    sources = frozenset().union(*(t.sources for t in settled if isinstance(t, Moments)))
    return Moments.of(func(means, *args, **kwargs), func(variances, *args, **kwargs), sources)


@rule("pad")
def _pad(func: Any, x: Moments, pad: Any, mode: str = "constant", value: float | None = None) -> Moments:
    x = x.settled()
    return Moments.of(func(x.mu, pad, mode, value), func(x.sigma2, pad, mode), x.sources)


@rule("max_pool1d", "max_pool2d", "max_pool3d", *(f"adaptive_max_pool{d}d" for d in (1, 2, 3)))
def _max_pool(func: Any, x: Moments, *args: Any, return_indices: bool = False, **kwargs: Any) -> Moments:
    if return_indices:
        raise NoRule(f"{func.__name__} returns the indices of maxima, which are random")
    before = x if x.activation is None or x.activation.rising else x.settled()
    mean, places = getattr(F, func.__name__)(before.mu, *args, return_indices=True, **kwargs)
    after = Moments.of(mean, _taken(before.sigma2, places, int(func.__name__[-2])), before.sources)
    after.activation = before.activation
    return after


def _taken(values: Tensor, places: Tensor, dims: int) -> Tensor:
    """Gather the values at flat indices into the last `dims` dimensions."""
    if dims == 2 and all(t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in (values, places)):
        flat = values.permute(0, 2, 3, 1).flatten(1, 2)  # no copy, as flattening the channels would be
        taken: Tensor = flat.gather(1, places.permute(0, 2, 3, 1).flatten(1, 2))
        return taken.view(len(taken), *places.shape[2:], -1).permute(0, 3, 1, 2)
    taken = values.flatten(-dims).gather(-1, places.flatten(-dims))
    return taken.view(places.shape)


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d", *(f"adaptive_avg_pool{d}d" for d in (1, 2, 3)))
def _average_pool(func: Any, x: Moments, *args: Any, **kwargs: Any) -> Moments:
    x = x.settled()
    return Moments.of(func(x.mu, *args, **kwargs), func(x.sigma2.sqrt(), *args, **kwargs).square(), x.sources)


@rule("mean", "sum")
def _reduced(func: Any, x: Moments, *args: Any, **kwargs: Any) -> Moments:
    x = x.settled()
    mean = func(x.mu, *args, **kwargs)
    if x.mu.ndim > 2:  # over positions
        return Moments.of(mean, func(x.sigma2.sqrt(), *args, **kwargs).square(), x.sources)
    variance = func(x.sigma2, *args, **kwargs)
    if func.__name__ == "mean":  # over units
        variance = variance * (mean.numel() / x.mu.numel())
    return Moments.of(mean, variance, x.sources)
