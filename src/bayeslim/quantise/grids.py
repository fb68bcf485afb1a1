"""Where weights may lie: evenly spaced levels, or a codebook. A code is an integer, and code 0 is exactly zero.

    evenly:    w = scale · code,      code = −(2^(b−1) − 1), …, 2^(b−1) − 1      (one bit: ± scale)
    codebook:  w = values[code],      code = 0, …, 2^b − 1,  values[0] = 0

Scales and codebooks are bfloat16 numbers, of two bytes each. So scale · code is exact in single precision up to 16
bits, and every program that decodes gets the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_BITS = 16


def limit_of(bits: Tensor) -> Tensor:
    """The largest code of a width.

    >>> limit_of(torch.tensor([1, 2, 3, 8])).tolist()
    [1, 1, 3, 127]
    """
    return (2 ** (bits - 1) - 1).clamp(min=1)


def storable(values: Tensor) -> Tensor:
    """The nearest numbers that two bytes hold."""
    return values.to(torch.bfloat16).float()


@dataclass(frozen=True, eq=False)
class Uniform:
    """Evenly spaced levels around zero.

    Attributes:
        scale: the step, float32; a scalar, or (units, 1, ...) for one a unit.
        bits: the width of a code, of the same shape.
    """

    scale: Tensor
    bits: Tensor

    def cpu(self) -> Uniform:
        """The same in main memory."""
        return Uniform(self.scale.cpu(), self.bits.cpu())

    @property
    def limit(self) -> Tensor:
        """The largest code."""
        return limit_of(self.bits)

    @property
    def numbers(self) -> Tensor:
        """What has to be stored beside the codes: the scales."""
        return self.scale.flatten()

    def decode(self, codes: Tensor) -> Tensor:
        """The weights of codes, float32."""
        return codes.float() * self.scale


@dataclass(frozen=True, eq=False)
class Codebook:
    """Levels anywhere, one of them zero.

    Attributes:
        values: the levels, float32, (K,); the first is zero.
    """

    values: Tensor

    def cpu(self) -> Codebook:
        """The same in main memory."""
        return Codebook(self.values.cpu())

    @property
    def bits(self) -> Tensor:
        """The width of a code."""
        return torch.tensor(max(1, (len(self.values) - 1).bit_length()), device=self.values.device)

    @property
    def numbers(self) -> Tensor:
        """What has to be stored beside the codes: the levels other than zero."""
        return self.values[1:]

    def decode(self, codes: Tensor) -> Tensor:
        """The weights of codes, float32."""
        return self.values[codes.long()]


Grid = Uniform | Codebook
