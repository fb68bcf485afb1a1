"""Logarithms and powers of two in integers, the same on every machine.

A floating-point library may round its logarithm one way here and another there, and a coder that disagrees with itself
in one place reads nonsense from there on. So both are tables of 1,024 integers, made by integer square roots and
squares, with straight lines between them: both are monotone, and off by less than one part in a million.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

ONE = 1 << 32
"""The unit of a logarithm."""

POWER_BITS = 28
"""`power(0)` is 2 to this."""

_SIZE_BITS, _EXACT = 10, 96
_SIZE = 1 << _SIZE_BITS
_REST = 32 - _SIZE_BITS


def log2(x: int) -> int:
    """ONE times the binary logarithm of a positive integer.

    >>> log2(1 << 50) / ONE, round(log2(10) / ONE, 5)
    (50.0, 3.32193)
    """
    whole = x.bit_length() - 1
    mantissa = (x << 32 >> whole) - ONE
    table, place = _logarithms(), mantissa >> _REST
    low = table[place]
    return (whole << 32) + low + ((table[place + 1] - low) * (mantissa & ((1 << _REST) - 1)) >> _REST)


def power(exponent: int) -> int:
    """2 to the power POWER_BITS - exponent / ONE, for exponents of at least 0; falls as the exponent grows.

    >>> power(0) == 1 << 28, power(3 * ONE) == 1 << 25
    (True, True)
    """
    whole, rest = exponent >> 32, exponent & (ONE - 1)
    if whole > POWER_BITS:
        return 0
    table, place = _powers(), rest >> _REST
    high = table[place]
    return (high - ((high - table[place + 1]) * (rest & ((1 << _REST) - 1)) >> _REST)) >> whole


def powers(exponents: NDArray[np.int64]) -> NDArray[np.int64]:
    """`power` of many exponents below 2⁵⁶.

    >>> exponents = [0, ONE // 3, 5 * ONE + 7, 40 * ONE]
    >>> powers(np.array(exponents)).tolist() == [power(exponent) for exponent in exponents]
    True
    """
    table = np.array(_powers())
    whole, rest = exponents >> 32, exponents & (ONE - 1)
    place = rest >> _REST
    high = table[place]
    found = high - ((high - table[place + 1]) * (rest & ((1 << _REST) - 1)) >> _REST)
    return np.where(whole > POWER_BITS, 0, found >> np.minimum(whole, POWER_BITS))


@functools.cache
def _logarithms() -> list[int]:
    """ONE · log2(1 + i / 1024): a digit of the logarithm is whether the square is at least 2."""
    found = []
    for i in range(_SIZE):
        x, digits = (_SIZE + i) << (_EXACT - _SIZE_BITS), 0
        for _ in range(32):
            x = x * x >> _EXACT
            digits <<= 1
            if x >= 2 << _EXACT:
                x >>= 1
                digits |= 1
        found.append(digits)
    return [*found, ONE]


@functools.cache
def _powers() -> list[int]:
    """2 ** (POWER_BITS - i / 1024), from the tenth square root of one half."""
    root = 1 << (_EXACT - 1)
    for _ in range(_SIZE_BITS):
        root = math.isqrt(root << _EXACT)
    x, found = 1 << _EXACT, []
    for _ in range(_SIZE + 1):
        found.append(x >> (_EXACT - POWER_BITS))
        x = x * root >> _EXACT
    return found
