"""Base-2 logarithms and powers in integer arithmetic, the same on every machine.

Floating-point libraries round logarithms differently. A decoder whose probabilities differ from the encoder's in one
place decodes garbage from there on. So both functions interpolate linearly in a table of 1,025 integers: both are
monotone, and their relative error is below one part in a million.

The tables come from `math.log2` and `math.exp2`. Their exact values are far enough from a rounding boundary that the
error of any floating-point library rounds away; a test checks the margin.
"""

from __future__ import annotations

import math

ONE = 1 << 32
"""The integer that stands for a logarithm of 1."""

POWER_BITS = 28
"""`power(0)` is 2 to this."""

_TABLE_BITS = 10
_TABLE_SIZE = 1 << _TABLE_BITS
_FRACTION_BITS = 32 - _TABLE_BITS
_FRACTION_MASK = (1 << _FRACTION_BITS) - 1

LOGARITHMS = tuple(round(ONE * math.log2(1 + i / _TABLE_SIZE)) for i in range(_TABLE_SIZE + 1))
"""ONE · log2(1 + i / 1024), rounded."""

POWERS = tuple(round(math.exp2(POWER_BITS - i / _TABLE_SIZE)) for i in range(_TABLE_SIZE + 1))
"""2 ** (POWER_BITS - i / 1024), rounded."""


def log2(x: int) -> int:
    """Compute ONE times the base-2 logarithm of a positive integer.

    >>> log2(1 << 50) / ONE, round(log2(10) / ONE, 5)
    (50.0, 3.32193)
    """
    whole = x.bit_length() - 1
    mantissa = (x << 32 >> whole) - ONE
    index = mantissa >> _FRACTION_BITS
    low = LOGARITHMS[index]
    return (whole << 32) + low + ((LOGARITHMS[index + 1] - low) * (mantissa & _FRACTION_MASK) >> _FRACTION_BITS)


def power(exponent: int) -> int:
    """Compute 2 ** (POWER_BITS - exponent / ONE) for an exponent of at least 0.

    >>> power(0) == 1 << 28, power(3 * ONE) == 1 << 25
    (True, True)
    """
    whole, rest = exponent >> 32, exponent & (ONE - 1)
    if whole > POWER_BITS:
        return 0
    index = rest >> _FRACTION_BITS
    high = POWERS[index]
    return (high - ((high - POWERS[index + 1]) * (rest & _FRACTION_MASK) >> _FRACTION_BITS)) >> whole
