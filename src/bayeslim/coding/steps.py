"""Values on a grid: integers times one step, exactly.

A floating-point number is an integer times a power of two, so the largest common step is a greatest common divisor. It
is computed from the values alone, and gives each of them back to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bayeslim.coding.adaptive import Naturals
from bayeslim.coding.coders import Coder
from bayeslim.coding.formats import Floats
from bayeslim.coding.geometry import Integers

_MANTISSA_BITS = 53
_MAX_CODE_BITS = 62
_MAX_EXPONENT = 1 << 12


@dataclass(frozen=True)
class Step:
    """mantissa · 2^exponent, with an odd mantissa."""

    mantissa: int
    exponent: int

    def values(self, codes: Integers) -> Floats:
        """Multiply codes by the step."""
        return np.ldexp((codes * self.mantissa).astype(np.float64), self.exponent)


def common_step(values: Floats) -> tuple[Step, Integers] | None:
    """Find the largest step that divides all values, and the multiples.

    Returns:
        None if a value is zero or not finite, or if the multiples would need more than 62 bits.

    >>> common_step(np.array([0.75, -1.5, 2.25]))
    (Step(mantissa=3, exponent=-2), array([ 1, -2,  3]))
    """
    if not len(values) or not np.isfinite(values).all() or not values.all():
        return None
    fractions, exponents = np.frexp(values)
    whole = np.ldexp(fractions, _MANTISSA_BITS).astype(np.int64)
    zeros = np.log2((whole & -whole).astype(np.float64)).astype(np.int64)
    whole, exponents = whole >> zeros, exponents.astype(np.int64) - _MANTISSA_BITS + zeros
    least = int(exponents.min())
    if int((np.frexp(np.abs(values))[1] - least).max()) > _MAX_CODE_BITS:
        return None
    whole = whole << (exponents - least)
    divisor = int(np.gcd.reduce(np.abs(whole)))
    return Step(divisor, least), whole // divisor


class Steps:
    """Adaptive steps: those of one network have similar sizes."""

    def __init__(self) -> None:
        self._lengths, self._sizes = Naturals(_MANTISSA_BITS), Naturals(2 * _MAX_EXPONENT)

    def code(self, coder: Coder, step: Step) -> Step:
        """Code a step and update the counts."""
        length = min(self._lengths.code(coder, step.mantissa.bit_length() - 1) + 1, _MANTISSA_BITS)
        size = step.exponent + step.mantissa.bit_length()
        size = unzigzag(self._sizes.code(coder, zigzag(size)))
        mantissa = 1
        for place in range(length - 2, 0, -1):
            mantissa = mantissa << 1 | coder.bit(step.mantissa >> place & 1, 1, 2)
        return Step(mantissa << 1 | 1 if length > 1 else 1, size - length)


def zigzag(number: int) -> int:
    """Map 0, −1, 1, −2, ... to 0, 1, 2, 3, ..."""
    return 2 * number if number >= 0 else -2 * number - 1


def unzigzag(number: int) -> int:
    """Undo `zigzag`."""
    return -(number + 1) // 2 if number % 2 else number // 2
