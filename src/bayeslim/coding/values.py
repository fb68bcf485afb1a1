"""The values of non-zeros, in whichever of four ways takes the fewest bits.

* grid: integers times one step;
* rows: integers times a step for each row;
* table: few values, listed once; a table may serve several tensors;
* raw: every value as it is, its sign and exponent by how often they occurred.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bayeslim.coding.adaptive import Naturals, Symbols
from bayeslim.coding.coders import Coder, Meter
from bayeslim.coding.codes import LARGEST_ALPHABET, code_codes
from bayeslim.coding.formats import Format, Patterns
from bayeslim.coding.geometry import Grid, Integers
from bayeslim.coding.steps import Step, Steps, common_step

GRID, ROWS, TABLE, RAW = range(4)
_LARGEST_CODE = 1 << 16
_LARGEST_TABLE = 1 << 12
_PIECE = 16
_NO_STEP = Step(1, 0)


@dataclass(frozen=True)
class Places:
    """Where the non-zeros of a tensor are.

    Attributes:
        hits: the columns of each row's non-zeros, rising.
        grid: the columns.
    """

    hits: Sequence[Integers]
    grid: Grid

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
        """The way that takes the fewest bits."""
        found = common_step(form.floats(patterns))
        if found is not None and np.abs(found[1]).max() <= LARGEST_ALPHABET:
            return GRID
        costs = {}
        for kind in (GRID, ROWS, TABLE, RAW):
            meter = Meter()
            try:
                copy.deepcopy(self).code(meter, kind, patterns, places, form)
            except Impossible:
                continue
            costs[kind] = meter.bits
        return min(costs, key=lambda kind: costs[kind])

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
        codes = code_codes(coder, codes, places.hits, places.grid, self._most(coder, codes))
        return form.nearest(step.values(codes))

    def _rows(self, coder: Coder, patterns: Patterns | None, places: Places, form: Format) -> Patterns:
        given, codes = [_NO_STEP] * len(places.hits), None
        if patterns is not None:
            found = [_on_step(row, form) for row in places.rows(patterns)]
            given, codes = [step for step, _ in found], np.concatenate([codes for _, codes in found])
        rows = sum(len(columns) > 0 for columns in places.hits)
        steps = [self._steps.code(coder, step) for step in given[:rows]]
        codes = code_codes(coder, codes, places.hits, places.grid, self._most(coder, codes))
        parts = zip(steps, places.rows(codes.view(np.uint64)), strict=True)
        return np.concatenate([form.nearest(step.values(part.view(np.int64))) for step, part in parts])

    def _table(self, coder: Coder, patterns: Patterns | None, places: Places, form: Format) -> Patterns:
        negative, positive = self._choose_table(coder, patterns, form)
        codes = None
        if patterns is not None:
            ranks = np.searchsorted(negative, patterns), np.searchsorted(positive, patterns)
            codes = np.where(_is_negative(patterns, form), -1 - ranks[0], 1 + ranks[1])
        codes = code_codes(coder, codes, places.hits, places.grid, (len(negative), len(positive)))
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
        fits = (place for place, table in enumerate(self._tables) if np.isin(wanted, np.concatenate(table)).all())
        place = coder.uniform(next(fits, len(self._tables)), len(self._tables) + 1)
        if place == len(self._tables):
            self._tables.append(self._new_table(coder, wanted, form))
        return self._tables[place]

    def _new_table(self, coder: Coder, wanted: Patterns, form: Format) -> tuple[Patterns, Patterns]:
        if len(wanted) > _LARGEST_TABLE:
            raise Impossible
        joint = int(np.bitwise_or.reduce(wanted)) if len(wanted) else 1
        idle = coder.uniform((joint & -joint).bit_length() - 1, form.bits)
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


def _is_negative(patterns: Patterns, form: Format) -> NDArray[np.bool_]:
    return (patterns >> np.uint64(form.bits - 1)).astype(np.bool_)


def _code_bits(coder: Coder, number: int, bits: int) -> int:
    """The lowest bits of a number, as they are."""
    found = 0
    for place in range(0, bits, _PIECE):
        size = min(_PIECE, bits - place)
        found |= coder.uniform(number >> place & (1 << size) - 1, 1 << size) << place
    return found
