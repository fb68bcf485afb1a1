"""Gaussian noise for samplers, which need it at every step for every weight and would spend most of a step on it.

On a CPU each value is one of 65,536 equally likely levels, the quantiles of N(0, 1) scaled to a variance of exactly
one: sixteen random bits and a look-up, a third of the cost of an exact draw. The levels end at ±4.3 and have a kurtosis
of 2.99. A step of size h needs the first moments alone to be right to first order in h, as the step itself is; what the
chain makes of many such draws is Gaussian far beyond that.

Talay & Tubaro 1990 for which moments count
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

LEVELS = 1 << 16
SMALL = 1 << 12
"""Below this many values torch's own generator is quicker than starting a stream."""


def noise_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """ε ~ N(0, 1) of the shapes, dtypes and devices of tensors: one draw for all of a kind, from torch's own seed."""
    together: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        together[tensor.dtype, tensor.device].append(index)
    noise: list[Tensor] = [torch.empty(0)] * len(tensors)
    for (dtype, device), indices in together.items():
        sizes = [tensors[index].numel() for index in indices]
        parts = _drawn(sum(sizes), dtype, device).split(sizes)
        for index, part in zip(indices, parts, strict=True):
            noise[index] = part.view(tensors[index].shape)
    return noise


def _drawn(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or dtype not in (torch.float32, torch.float64) or size < SMALL:
        return torch.randn(size, dtype=dtype, device=device)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    bits = np.random.SFC64(seed).random_raw(-(-size // 4)).view(np.uint16)[:size]
    return torch.index_select(_levels(dtype), 0, torch.from_numpy(bits.astype(np.int32)))


@cache
def _levels(dtype: torch.dtype) -> Tensor:
    quantiles: Tensor = torch.special.ndtri((torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS)
    return (quantiles / quantiles.square().mean().sqrt()).to(dtype)
