"""Signed codes of the non-zeros of a weight.

Neighbours in a picture tend to have one sign, and sizes that are alike: they are the context of a code, as far as they
were coded before it. How large codes are to be expected the posterior says (`expected.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from bayeslim.coding.adaptive import Bits, Naturals, Symbols
from bayeslim.coding.coders import Coder, Meter
from bayeslim.coding.expected import WEIGHTS, Curve, Masses, closest_curve
from bayeslim.coding.geometry import Grid, Integers

BEFORE = ((0, -1), (-1, 0), (-1, 1), (-1, -1))
LARGEST_ALPHABET = 256
_SIZES = 5
_TRIED = 4096
"""How many codes are tried to see what a curve is worth."""


def code_codes(
    coder: Coder,
    given: Integers | None,
    hits: Sequence[Integers],
    grid: Grid,
    most: tuple[int, int],
    masses: Masses | None = None,
) -> Integers:
    """Pass the codes of all non-zeros, row by row, through a coder.

    Args:
        coder: which way.
        given: the codes, none of them 0; None when reading.
        hits: the columns of each row's non-zeros.
        grid: the columns.
        most: the largest absolute codes, of negative and of positive ones; 0 where there are none.
        masses: how probable the sizes 1, 2, ... are, for those that write; if not given, as frequent as they are.
    """
    curve = None
    if 1 < max(most) <= LARGEST_ALPHABET and any(map(len, hits)):
        if given is not None:
            curve = _best_curve(given, hits, grid, most, masses)
        if coder.bit(int(curve is not None), 1, 2):
            curve = (curve or Curve(0, 0, 0)).code(coder)
    return _pass(coder, given, hits, grid, most, curve)


def _best_curve(
    given: Integers, hits: Sequence[Integers], grid: Grid, most: tuple[int, int], masses: Masses | None
) -> Curve | None:
    """The curve that is closest to the masses, worth what makes the codes cheapest; None if nothing does."""
    rows = int(np.searchsorted(np.cumsum([len(columns) for columns in hits]), _TRIED)) + 1
    hits = hits[:rows]
    given = given[: sum(map(len, hits))]
    if masses is None:
        masses = np.bincount(np.abs(given))[1:].astype(float)
    closest = closest_curve(masses[: max(most)])
    best, least = None, _cost(given, hits, grid, most, None)
    for weight in range(len(WEIGHTS)):
        curve = replace(closest, weight=weight)
        if (cost := _cost(given, hits, grid, most, curve)) < least:
            best, least = curve, cost
    return best


def _cost(given: Integers, hits: Sequence[Integers], grid: Grid, most: tuple[int, int], curve: Curve | None) -> float:
    meter = Meter()
    if curve is not None:
        curve.code(meter)
    _pass(meter, given, hits, grid, most, curve)
    return meter.bits


def _pass(
    coder: Coder,
    given: Integers | None,
    hits: Sequence[Integers],
    grid: Grid,
    most: tuple[int, int],
    curve: Curve | None,
) -> Integers:
    signs = Bits()
    sizes = [Symbols(max(largest, 1), curve) if largest <= LARGEST_ALPHABET else Naturals(largest) for largest in most]
    found, place = np.zeros(sum(map(len, hits)), np.int64), 0
    for columns in hits:
        row: dict[int, int] = {}
        last = 0
        for column in columns.tolist():
            code = int(given[place]) if given is not None else 0
            beside = [row[other] for other in grid.at(column, BEFORE) if other in row] if grid.area > 1 else []
            code = _code_one(coder, code, beside, last, signs, sizes, most)
            row[column] = found[place] = last = code
            place += 1
    return found


def _code_one(
    coder: Coder,
    code: int,
    beside: list[int],
    last: int,
    signs: Bits,
    sizes: Sequence[Symbols | Naturals],
    most: tuple[int, int],
) -> int:
    positive = int(most[1] > 0)
    if all(most):
        majority = sum(_sign(other) for other in beside)
        contexts: tuple[Hashable, ...] = (_sign(majority), (_sign(majority), _sign(last))) if beside else ()
        positive = signs.code(coder, int(code > 0), None, *contexts)
    contexts = (min((2 * sum(map(abs, beside)) // len(beside)).bit_length(), _SIZES),) if beside else ()
    size = sizes[positive].code(coder, abs(code) - 1, *contexts) + 1
    return size if positive else -size


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
