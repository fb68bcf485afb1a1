"""Noise for samplers, which need it at every step for every weight and would spend much of a step on it.

A discretisation that is right to first order in its step, as all here are, stays so with any noise whose mean, variance
and skewness are those of N(0, 1): a chain sums up many draws, and their sum is what it sees. On a CPU seven random bits
make an odd number in ±1, ±3, ..., ±127, all equally likely, which is a seventh of the cost of a Gaussian draw. For
Langevin dynamics in a direction of curvature λ this gives the chain an excess kurtosis of −1.2 lr λ, where its variance
is off by ½ lr λ of itself already; with momentum it is less. On other devices, and of few values, draws are Gaussian.

Kloeden & Platen 1992, section 14.1, on simplified weak schemes · Talay & Tubaro 1990
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

UNIT = math.sqrt((128**2 - 1) / 3)
"""The standard deviation of odd numbers between −127 and 127."""

SMALL = 1 << 12
"""Below this many values torch's own generator is quicker than starting a stream."""


def noise_like(tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> tuple[list[Tensor], float]:
    """Noise of the shapes, dtypes and devices of tensors, and its standard deviation, for a factor to make up for.

    One draw for all of a kind, from torch's own seed.

    Args:
        tensors: what the noise is for.
        out: where it may be put. New memory costs a CPU as much as the draws.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        kinds[tensor.dtype, tensor.device].append(index)
    sizes = [tensor.numel() for tensor in tensors]
    if len(kinds) == 1 and sum(sizes) >= SMALL and _is_quick(tensors[0]):
        noise = [torch.empty_like(tensor) for tensor in tensors] if out is None else list(out)
        for own, part in zip(noise, _odd_numbers(sum(sizes)).split(sizes), strict=True):
            own.copy_(part.view(own.shape))
        return noise, UNIT
    noise = list(tensors)
    for (dtype, device), indices in kinds.items():
        counts = [sizes[index] for index in indices]
        drawn = torch.randn(sum(counts), dtype=dtype, device=device)
        for index, part in zip(indices, drawn.split(counts), strict=True):
            noise[index] = part.view(tensors[index].shape)
    return noise, 1.0


def _is_quick(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def _odd_numbers(size: int) -> Tensor:
    seed = int(torch.empty((), dtype=torch.int64).random_())
    bits = np.random.SFC64(seed).random_raw(-(-size // 8))
    bits |= np.uint64(0x0101010101010101)  # odd bytes lie evenly around zero
    return torch.from_numpy(bits.view(np.int8)[:size])
