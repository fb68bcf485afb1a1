"""Noise for samplers, which need it at every step for every weight and would spend much of a step on it.

A discretisation that is right to first order in its step, as all here are, stays so with any noise whose mean, variance
and skewness are those of N(0, 1): a chain sums up many draws, and their sum is what it sees. On a CPU two random bits
make one of −96, −32, 32 and 96, all equally likely, which is a tenth of the cost of a Gaussian draw. For Langevin
dynamics in a direction of curvature λ this gives the chain an excess kurtosis of −1.36 lr λ, where its variance is off
by ½ lr λ of itself already; with momentum it is less. On other devices, and of few values, draws are Gaussian.

Kloeden & Platen 1992, section 14.1, on simplified weak schemes · Talay & Tubaro 1990
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

UNIT = 64 * math.sqrt((4**2 - 1) / 12)
"""The standard deviation of four levels, 64 apart."""

SMALL = 1 << 12
"""Below this many values Gaussian draws are as quick."""

_SHIFTS = np.array([[0], [2], [4], [6]])
_TOP, _MIDDLE = np.int64(-0x3F3F3F3F3F3F3F40), np.int64(0x2020202020202020)
"""The highest two bits of every byte, and half of the lowest of these, which makes bytes even around zero."""


class Noise:
    """Memory for noise beside some tensors, drawn for all of them at once, again and again, from torch's own seed.

    Args:
        tensors: what the noise is for.

    Attributes:
        parts: the noise of each tensor, of its shape, type and device.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
        for index, tensor in enumerate(tensors):
            kinds[tensor.dtype, tensor.device].append(index)
        self.parts: list[Tensor] = list(tensors)
        self._stretches: list[Tensor] = []
        for (dtype, device), indices in kinds.items():
            sizes = [tensors[index].numel() for index in indices]
            self._stretches.append(torch.zeros(sum(sizes), dtype=dtype, device=device))
            for index, part in zip(indices, self._stretches[-1].split(sizes), strict=True):
                self.parts[index] = _like(tensors[index], part)
        self._bits = _Bits(self._stretches[0]) if len(kinds) == 1 and _Bits.suit(self._stretches[0]) else None

    def draw(self) -> float:
        """Fill the memory anew; returns the standard deviation, for a factor to make up for."""
        if self._bits is not None:
            self._bits.fill()
            return UNIT
        for stretch in self._stretches:
            stretch.normal_()
        return 1.0


class _Bits:
    """Random levels of two bits: the four pairs of bits of a random byte become the highest of a byte each."""

    def __init__(self, target: Tensor):
        self._target = target
        self._drawn = torch.empty(-(-len(target) // 32), dtype=torch.int64)
        self._levels = np.empty((4, len(self._drawn)), np.int64)
        self._bytes = torch.from_numpy(self._levels.reshape(-1).view(np.int8)[: len(target)])

    @staticmethod
    def suit(target: Tensor) -> bool:
        return target.device.type == "cpu" and target.dtype in (torch.float32, torch.float64) and len(target) >= SMALL

    def fill(self) -> None:
        self._drawn.random_(-(2**63), None)
        levels = np.left_shift(self._drawn.numpy(), _SHIFTS, out=self._levels)
        np.bitwise_and(levels, _TOP, out=levels)
        np.bitwise_or(levels, _MIDDLE, out=levels)
        self._target.copy_(self._bytes)


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """A stretch of memory in a tensor's shape, and in its order where that is dense: passes over both are quicker."""
    dense = torch.empty_like(tensor, device="meta").stride()  # the tensor's own where it is dense
    return memory.as_strided(tensor.shape, dense, memory.storage_offset())
