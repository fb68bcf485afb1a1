"""Floating-point formats: numbers as bit patterns, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Patterns = NDArray[np.uint64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Format:
    """A floating-point format.

    Attributes:
        dtype: of tensors.
        bits: of a number.
        fraction: bits after the sign and the exponent.
    """

    dtype: torch.dtype
    bits: int
    fraction: int

    def patterns(self, numbers: Tensor) -> Patterns:
        """Return the bit patterns of a tensor's numbers."""
        signed = numbers.contiguous().view(getattr(torch, f"int{self.bits}")).numpy()
        return signed.astype(np.int64).view(np.uint64) & np.uint64((1 << self.bits) - 1)

    def numbers(self, patterns: Patterns) -> Tensor:
        """Return the numbers with these bit patterns."""
        unsigned = patterns.astype(np.dtype(f"uint{self.bits}"))
        return torch.from_numpy(unsigned.view(np.dtype(f"int{self.bits}"))).view(self.dtype)

    def floats(self, patterns: Patterns) -> Floats:
        """Return the numbers with these bit patterns in double precision."""
        return self.numbers(patterns).double().numpy()

    def nearest(self, floats: Floats) -> Patterns:
        """Round double-precision numbers to the format and return their bit patterns."""
        return self.patterns(torch.from_numpy(floats).to(self.dtype))


FORMATS = {
    dtype: Format(dtype, bits, fraction)
    for dtype, bits, fraction in (
        (torch.float32, 32, 23),
        (torch.float16, 16, 10),
        (torch.bfloat16, 16, 7),
        (torch.float64, 64, 52),
    )
}
"""The floating-point formats that files hold, by dtype."""
