"""The signed integer codes of a weight's non-zeros.

Neighbours in an image tend to share a sign and a size. The neighbours that were coded before are the context of a code.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from bayeslim.coding.adaptive import Bits, Naturals, Symbols
from bayeslim.coding.coders import Coder
from bayeslim.coding.geometry import Grid, Integers

EARLIER_NEIGHBOURS = ((0, -1), (-1, 0), (-1, 1), (-1, -1))
MAX_ALPHABET = 256
_MAX_SIZE_CONTEXT = 5


def code_codes(
    coder: Coder, given: Integers | None, rows: Sequence[Integers], grid: Grid, largest: tuple[int, int]
) -> Integers:
    """Code the codes of all non-zeros, row by row.

    Args:
        coder: the writer or reader.
        given: the codes, none of them 0; None when reading.
        rows: the columns of each row's non-zeros.
        grid: the columns.
        largest: the largest absolute values of negative and of positive codes; 0 where there are none.
    """
    signs = Bits()
    sizes = [Symbols(max(most, 1)) if most <= MAX_ALPHABET else Naturals(most) for most in largest]
    found, place = np.zeros(sum(map(len, rows)), np.int64), 0
    for columns in rows:
        row: dict[int, int] = {}
        last = 0
        for column in columns.tolist():
            code = int(given[place]) if given is not None else 0
            earlier = grid.at(column, EARLIER_NEIGHBOURS) if grid.area > 1 else []
            neighbours = [row[other] for other in earlier if other in row]
            code = _code_one(coder, code, neighbours, last, signs, sizes, largest)
            row[column] = found[place] = last = code
            place += 1
    return found


def _code_one(
    coder: Coder,
    code: int,
    neighbours: list[int],
    last: int,
    signs: Bits,
    sizes: Sequence[Symbols | Naturals],
    largest: tuple[int, int],
) -> int:
    positive = int(largest[1] > 0)
    if all(largest):
        majority = _sign(sum(_sign(other) for other in neighbours))
        contexts: tuple[Hashable, ...] = (majority, (majority, _sign(last))) if neighbours else ()
        positive = signs.code(coder, int(code > 0), None, *contexts)
    contexts = ()
    if neighbours:
        twice_the_mean = 2 * sum(map(abs, neighbours)) // len(neighbours)
        contexts = (min(twice_the_mean.bit_length(), _MAX_SIZE_CONTEXT),)
    size = sizes[positive].code(coder, abs(code) - 1, *contexts) + 1
    return size if positive else -size


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
