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

from bayeslim.coding.adaptive import Naturals, Symbols
from bayeslim.coding.coders import Coder, Meter
from bayeslim.coding.codes import code_codes
from bayeslim.coding.formats import Format, Patterns
from bayeslim.coding.geometry import Grid, Integers
from bayeslim.coding.steps import Step, Steps, common_step

GRID, ROWS, TABLE, RAW = range(4)
_LARGEST_CODE = 1 << 16
_LARGEST_TABLE = 1 << 12
_PIECE = 16


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

    @property
    def ends(self) -> list[int]:
        """Where rows end in the list of all non-zeros."""
        return np.cumsum([len(columns) for columns in self.hits])[:-1].tolist()


class Values:
    """Codes the values of one tensor after the other, and learns what they share: sizes of steps, and tables."""

    def __init__(self) -> None:
        self._steps, self._sizes, self._kinds = Steps(), Naturals(_LARGEST_CODE), Symbols(4)
        self._tables: list[tuple[Patterns, Patterns]] = []

    def best(self, patterns: Patterns, places: Places, form: Format) -> int:
        """The way that takes the fewest bits."""
        costs = {}
        for kind in (GRID, ROWS, TABLE, RAW):
            meter = Meter()
            try:
                copy.deepcopy(self).code(meter, kind, patterns, places, form)
            except _Impossible:
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
        """
        kind = self._kinds.code(coder, kind)
        way = (self._grid, self._rows, self._table, self._raw)[kind]
        return way(coder, patterns, places, form)

    def _grid(self, coder: Coder, patterns: Patterns | None, places: Places, form: Format) -> Patterns:
        found = None if patterns is None else _on_step(patterns, form)
        step, codes = found or (Step(1, 0), None)
        step = self._steps.code(coder, step)
        codes = code_codes(coder, codes, places.hits, places.grid, self._most(coder, codes))
        return form.nearest(step.values(codes))

    def _rows(self, coder: Coder, patterns: Patterns | None, places: Places, form: Format) -> Patterns:
        ends, codes, steps = places.ends, None, list[Step]()
        if patterns is not None:
            found = [_on_step(part, form) for part in np.split(patterns, ends) if len(part)]
            codes, given = np.concatenate([codes for _, codes in found]), [step for step, _ in found]
        rows = sum(len(columns) > 0 for columns in places.hits)
        steps = [self._steps.code(coder, given[row] if patterns is not None else Step(1, 0)) for row in range(rows)]
        codes = code_codes(coder, codes, places.hits, places.grid, self._most(coder, codes))
        parts = [part for part in np.split(codes, ends) if len(part)]
        return np.concatenate([form.nearest(step.values(part)) for step, part in zip(steps, parts, strict=True)])

    def _table(self, coder: Coder, patterns: Patterns | None, places: Places, form: Format) -> Patterns:
        negative, positive = self._choose_table(coder, patterns, form)
        codes = None
        if patterns is not None:
            minus = patterns >> np.uint64(form.bits - 1) == 1
            codes = np.where(minus, -1 - np.searchsorted(negative, patterns), 1 + np.searchsorted(positive, patterns))
        codes = code_codes(coder, codes, places.hits, places.grid, (len(negative), len(positive)))
        found = np.zeros(len(codes), np.uint64)
        found[codes > 0] = positive[codes[codes > 0] - 1]
        found[codes < 0] = negative[-codes[codes < 0] - 1]
        return found

    def _raw(self, coder: Coder, patterns: Patterns | None, places: Places, form: Format) -> Patterns:
        heads = Symbols(1 << (form.bits - form.fraction))
        found = np.zeros(places.count, np.uint64)
        for place in range(len(found)):
            pattern = int(patterns[place]) if patterns is not None else 0
            head = heads.code(coder, pattern >> form.fraction)
            found[place] = head << form.fraction | _code_bits(coder, pattern, form.fraction)
        return found

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
            raise _Impossible
        minus = wanted >> np.uint64(form.bits - 1) == 1
        joint = int(np.bitwise_or.reduce(wanted)) if len(wanted) else 0
        idle = coder.uniform((joint & -joint).bit_length() - 1 if joint else 0, form.bits)
        parts = []
        for given in (wanted[minus], wanted[~minus]):
            count = self._sizes.code(coder, len(given))
            padded = [*given.tolist(), *[0] * (count - len(given))]
            sign = (1 << form.bits - 1) * (not parts)
            entries = [_code_bits(coder, entry >> idle, form.bits - 1 - idle) << idle | sign for entry in padded]
            parts.append(np.array(entries, np.uint64))
        return parts[0], parts[1]


class _Impossible(Exception):
    """A way that these values cannot go."""


def _on_step(patterns: Patterns, form: Format) -> tuple[Step, Integers]:
    found = common_step(form.floats(patterns))
    if found is None or np.abs(found[1]).max() > _LARGEST_CODE:
        raise _Impossible
    return found


def _code_bits(coder: Coder, number: int, bits: int) -> int:
    """The lowest bits of a number, as they are."""
    found = 0
    for place in range(0, bits, _PIECE):
        size = min(_PIECE, bits - place)
        found |= coder.uniform(number >> place & (1 << size) - 1, 1 << size) << place
    return found
