"""Values that lie on a grid: exactly integers times one step.

A floating-point number is an integer times a power of two, so a common step is a greatest common divisor: it is found
from the values alone, whoever rounded them, and gives each of them back to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bayeslim.coding.adaptive import Naturals
from bayeslim.coding.coders import Coder
from bayeslim.coding.formats import Floats
from bayeslim.coding.geometry import Integers

_DIGITS = 53
_MOST_BITS = 62
_LARGEST_EXPONENT = 1 << 12


@dataclass(frozen=True)
class Step:
    """mantissa · 2^exponent, with an odd mantissa."""

    mantissa: int
    exponent: int

    def values(self, codes: Integers) -> Floats:
        """The values of codes."""
        return np.ldexp((codes * self.mantissa).astype(np.float64), self.exponent)


def common_step(values: Floats) -> tuple[Step, Integers] | None:
    """The largest step that all values are multiples of, and the multiples; None if there is none worth the name.

    >>> common_step(np.array([0.75, -1.5, 2.25]))
    (Step(mantissa=3, exponent=-2), array([ 1, -2,  3]))
    """
    if not len(values) or not np.isfinite(values).all() or not values.all():
        return None
    fractions, exponents = np.frexp(values)
    whole = np.ldexp(fractions, _DIGITS).astype(np.int64)
    zeros = np.log2((whole & -whole).astype(np.float64)).astype(np.int64)
    whole, exponents = whole >> zeros, exponents.astype(np.int64) - _DIGITS + zeros
    least = int(exponents.min())
    if int((np.frexp(np.abs(values))[1] - least).max()) > _MOST_BITS:
        return None
    whole = whole << (exponents - least)
    divisor = int(np.gcd.reduce(np.abs(whole)))
    return Step(divisor, least), whole // divisor


class Steps:
    """Adaptive steps: those of one network are of a size."""

    def __init__(self) -> None:
        self._lengths, self._sizes = Naturals(_DIGITS), Naturals(2 * _LARGEST_EXPONENT)

    def code(self, coder: Coder, step: Step) -> Step:
        """Pass a step through a coder."""
        length = min(self._lengths.code(coder, step.mantissa.bit_length() - 1) + 1, _DIGITS)
        size = step.exponent + step.mantissa.bit_length()
        size = unfold(self._sizes.code(coder, fold(size)))
        mantissa = 1
        for place in range(length - 2, 0, -1):
            mantissa = mantissa << 1 | coder.bit(step.mantissa >> place & 1, 1, 2)
        return Step(mantissa << 1 | 1 if length > 1 else 1, size - length)


def fold(number: int) -> int:
    """0, −1, 1, −2, ... as 0, 1, 2, 3, ..."""
    return 2 * number if number >= 0 else -2 * number - 1


def unfold(number: int) -> int:
    """What `fold` made of a number, undone."""
    return -(number + 1) // 2 if number % 2 else number // 2
