"""The values of non-zeros, in whichever of four ways takes the fewest bits.

* grid: integers times one step;
* rows: integers times a step for each row;
* table: few values, listed once; a table may serve several tensors;
* raw: every value as it is, its sign and exponent by how often they occurred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayeslim.coding.adaptive import Naturals, Symbols
from bayeslim.coding.coders import Coder
from bayeslim.coding.codes import LARGEST_ALPHABET, code_codes
from bayeslim.coding.expected import Masses
from bayeslim.coding.formats import Format, Patterns
from bayeslim.coding.geometry import Grid, Integers
from bayeslim.coding.steps import Step, Steps, common_step

GRID, ROWS, TABLE, RAW = range(4)
_LARGEST_CODE = 1 << 16
_LARGEST_TABLE = 1 << 12
_PIECE = 16
_BITS_OF_A_STEP = 24.0
_NO_STEP = Step(1, 0)


@dataclass(frozen=True)
class Places:
    """Where the non-zeros of a tensor are.

    Attributes:
        hits: the columns of each row's non-zeros, rising.
        grid: the columns.
        masses: how probable the sizes of their codes are to a posterior, for those that write, where there is one.
    """

    hits: Sequence[Integers]
    grid: Grid
    masses: Masses | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(map(len, self.hits))

    def rows(self, listed: Patterns) -> list[Patterns]:
        """A list of something for all non-zeros, row by row, without the rows that have none."""
        ends = np.cumsum([len(columns) for columns in self.hits])[:-1]
        return [part for part in np.split(listed, ends) if len(part)]


class Impossible(Exception):
    """A way that these values cannot go."""


class Values:
    """Codes the values of one tensor after the other, and learns what they share: sizes of steps, and tables."""

    def __init__(self) -> None:
        self._steps, self._sizes, self._kinds = Steps(), Naturals(_LARGEST_CODE), Symbols(4)
        self._tables: list[tuple[Patterns, Patterns]] = []

    def best(self, patterns: Patterns, places: Places, form: Format) -> int:
        """The way that takes the fewest bits, by about what each takes."""
        costs = {RAW: _entropy(patterns >> np.uint64(form.fraction)) + len(patterns) * form.fraction}
        listed = np.unique(patterns)
        if len(listed) <= _LARGEST_TABLE:
            new = (
                0 if any(_holds(table, listed) for table in self._tables) else len(listed) * (form.bits - _idle(listed))
            )
            costs[TABLE] = _entropy(patterns) + new
        for kind, parts in ((GRID, [patterns]), (ROWS, places.rows(patterns))):
            try:
                codes = np.concatenate([_on_step(part, form)[1] for part in parts])
            except Impossible:
                continue
            few = np.abs(codes).max() <= LARGEST_ALPHABET
            costs[kind] = _BITS_OF_A_STEP * len(parts) + (_entropy(codes) if few else _digits(codes))
        return min(costs, key=lambda kind: costs[kind])

    @staticmethod
    def lie_on_grids(patterns: Patterns, places: Places, form: Format) -> bool:
        """Whether values are small integers times one step, or times one for each row."""
        for parts in ([patterns], places.rows(patterns)):
            try:
                for part in parts:
                    _on_step(part, form)
            except Impossible:
                continue
            return True
        return False

    def code(self, coder: Coder, kind: int, patterns: Patterns | None, places: Places, form: Format) -> Patterns:
        """Pass the values of all non-zeros of a tensor, row by row, through a coder.

        Args:
            coder: which way.
            kind: how, for those that write.
            patterns: the values' bits; None when reading.
            places: where they are.
            form: what numbers they are.

        Raises:
            Impossible: if these values cannot go that way.
        """
        way = (self._grid, self._rows, self._table, self._raw)[self._kinds.code(coder, kind)]
        return way(coder, patterns, places, form)

    def _grid(self, coder: Coder, patterns: Patterns | None, places: Places, form: Format) -> Patterns:
        given, codes = _on_step(patterns, form) if patterns is not None else (_NO_STEP, None)
        step = self._steps.code(coder, given)
        codes = code_codes(coder, codes, places.hits, places.grid, self._most(coder, codes), places.masses)
        return form.nearest(step.values(codes))

    def _rows(self, coder: Coder, patterns: Patterns | None, places: Places, form: Format) -> Patterns:
        given, codes = [_NO_STEP] * len(places.hits), None
        if patterns is not None:
            found = [_on_step(row, form) for row in places.rows(patterns)]
            given, codes = [step for step, _ in found], np.concatenate([codes for _, codes in found])
        rows = sum(len(columns) > 0 for columns in places.hits)
        steps = [self._steps.code(coder, step) for step in given[:rows]]
        codes = code_codes(coder, codes, places.hits, places.grid, self._most(coder, codes), places.masses)
        parts = zip(steps, places.rows(codes.view(np.uint64)), strict=True)
        return np.concatenate([form.nearest(step.values(part.view(np.int64))) for step, part in parts])

    def _table(self, coder: Coder, patterns: Patterns | None, places: Places, form: Format) -> Patterns:
        negative, positive = self._choose_table(coder, patterns, form)
        codes = None
        if patterns is not None:
            ranks = np.searchsorted(negative, patterns), np.searchsorted(positive, patterns)
            codes = np.where(_is_negative(patterns, form), -1 - ranks[0], 1 + ranks[1])
        codes = code_codes(coder, codes, places.hits, places.grid, (len(negative), len(positive)), places.masses)
        found = np.zeros(len(codes), np.uint64)
        found[codes > 0] = positive[codes[codes > 0] - 1]
        found[codes < 0] = negative[-codes[codes < 0] - 1]
        return found

    def _raw(self, coder: Coder, patterns: Patterns | None, places: Places, form: Format) -> Patterns:
        heads = Symbols(1 << (form.bits - form.fraction))
        given = patterns.tolist() if patterns is not None else [0] * places.count
        found = [
            heads.code(coder, one >> form.fraction) << form.fraction | _code_bits(coder, one, form.fraction)
            for one in given
        ]
        return np.array(found, np.uint64)

    def _most(self, coder: Coder, codes: Integers | None) -> tuple[int, int]:
        """The largest absolute values of negative and of positive codes."""
        given = (0, 0) if codes is None else (max(-int(codes.min()), 0), max(int(codes.max()), 0))
        return self._sizes.code(coder, given[0]), self._sizes.code(coder, given[1])

    def _choose_table(self, coder: Coder, patterns: Patterns | None, form: Format) -> tuple[Patterns, Patterns]:
        """An earlier table, or a new one: the values of either sign, in the order of their size."""
        wanted = np.unique(patterns) if patterns is not None else np.zeros(0, np.uint64)
        fits = (place for place, table in enumerate(self._tables) if _holds(table, wanted))
        place = coder.uniform(next(fits, len(self._tables)), len(self._tables) + 1)
        if place == len(self._tables):
            self._tables.append(self._new_table(coder, wanted, form))
        return self._tables[place]

    def _new_table(self, coder: Coder, wanted: Patterns, form: Format) -> tuple[Patterns, Patterns]:
        if len(wanted) > _LARGEST_TABLE:
            raise Impossible
        idle = coder.uniform(_idle(wanted), form.bits)
        negative = _is_negative(wanted, form)

        def entries(given: list[int], sign: int) -> Patterns:
            count = self._sizes.code(coder, len(given))
            padded = given or [0] * count
            found = [_code_bits(coder, entry >> idle, form.bits - 1 - idle) << idle | sign for entry in padded]
            return np.array(found, np.uint64)

        return entries(wanted[negative].tolist(), 1 << (form.bits - 1)), entries(wanted[~negative].tolist(), 0)


def _on_step(patterns: Patterns, form: Format) -> tuple[Step, Integers]:
    found = common_step(form.floats(patterns))
    if found is None or np.abs(found[1]).max() > _LARGEST_CODE:
        raise Impossible
    return found


def _entropy(symbols: NDArray[Any]) -> float:
    """About what adaptive symbols cost: their entropy, and a few bits for each that there is."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum()) + 4.0 * len(counts)


def _digits(codes: Integers) -> float:
    """About what codes of too many kinds to learn cost: their sign, how many digits they have, and those."""
    digits = np.floor(np.log2(np.abs(codes)))
    return float(digits.sum()) + len(codes) + _entropy(digits)


def _holds(table: tuple[Patterns, Patterns], wanted: Patterns) -> bool:
    return bool(np.isin(wanted, np.concatenate(table)).all())


def _idle(patterns: Patterns) -> int:
    """How many of the last bits are zero in all patterns."""
    joint = int(np.bitwise_or.reduce(patterns)) if len(patterns) else 1
    return (joint & -joint).bit_length() - 1


def _is_negative(patterns: Patterns, form: Format) -> NDArray[np.bool_]:
    return (patterns >> np.uint64(form.bits - 1)).astype(np.bool_)


def _code_bits(coder: Coder, number: int, bits: int) -> int:
    """The lowest bits of a number, as they are."""
    found = 0
    for place in range(0, bits, _PIECE):
        size = min(_PIECE, bits - place)
        found |= coder.uniform(number >> place & (1 << size) - 1, 1 << size) << place
    return found
