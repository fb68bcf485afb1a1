"""Quantisation grids: uniform levels, or a codebook. A code is an integer, and code 0 is exactly zero.

    uniform:   w = scale · code,      code = −(2^(b−1) − 1), …, 2^(b−1) − 1      (one bit: ± scale)
    codebook:  w = values[code],      code = 0, …, 2^b − 1,  values[0] = 0

Scales and levels are bfloat16 numbers of two bytes. So scale · code is exact in single precision up to 16 bits, and
every decoder gets the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_BITS = 16


def limit_of(bits: Tensor) -> Tensor:
    """Compute the largest code of a number of bits.

    >>> limit_of(torch.tensor([1, 2, 3, 8])).tolist()
    [1, 1, 3, 127]
    """
    return (2 ** (bits - 1) - 1).clamp(min=1)


def storable(values: Tensor) -> Tensor:
    """Round to the nearest bfloat16 numbers, as float32."""
    return values.to(torch.bfloat16).float()


@dataclass(frozen=True, eq=False)
class Uniform:
    """Uniform levels around zero.

    Attributes:
        scale: the step, float32; a scalar, or (units, 1, ...) for one step per unit.
        bits: bits per code, of the same shape.
    """

    scale: Tensor
    bits: Tensor

    def cpu(self) -> Uniform:
        """Copy to main memory."""
        return Uniform(self.scale.cpu(), self.bits.cpu())

    @property
    def limit(self) -> Tensor:
        """The largest code."""
        return limit_of(self.bits)

    @property
    def numbers(self) -> Tensor:
        """The numbers stored beside the codes: the scales."""
        return self.scale.flatten()

    def decode(self, codes: Tensor) -> Tensor:
        """Return the weights of codes, float32."""
        return codes.float() * self.scale


@dataclass(frozen=True, eq=False)
class Codebook:
    """Levels anywhere, one of them zero.

    Attributes:
        values: the levels, float32, (K,); the first is zero.
    """

    values: Tensor

    def cpu(self) -> Codebook:
        """Copy to main memory."""
        return Codebook(self.values.cpu())

    @property
    def bits(self) -> Tensor:
        """Bits per code."""
        return torch.tensor(max(1, (len(self.values) - 1).bit_length()), device=self.values.device)

    @property
    def numbers(self) -> Tensor:
        """The numbers stored beside the codes: the levels other than zero."""
        return self.values[1:]

    def decode(self, codes: Tensor) -> Tensor:
        """Return the weights of codes, float32."""
        return self.values[codes.long()]


Grid = Uniform | Codebook
