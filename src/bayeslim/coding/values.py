"""The values of a tensor's non-zeros, in the cheapest of four representations.

* grid: integers times one step;
* rows: integers times one step per row;
* table: indices into a short list of values; several tensors may share a table;
* raw: the bits of every value, with adaptive sign and exponent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayeslim.coding.adaptive import Naturals, Symbols
from bayeslim.coding.coders import Coder
from bayeslim.coding.codes import MAX_ALPHABET, code_codes
from bayeslim.coding.formats import Format, Patterns
from bayeslim.coding.geometry import Grid, Integers
from bayeslim.coding.steps import Step, Steps, common_step

GRID, ROWS, TABLE, RAW = range(4)
_MAX_CODE = 1 << 16
_MAX_TABLE_SIZE = 1 << 12
_UNIFORM_BITS = 16
_BITS_PER_STEP = 24.0
_NO_STEP = Step(1, 0)


@dataclass(frozen=True)
class NonZeros:
    """The positions of a tensor's non-zeros.

    Attributes:
        rows: the columns of each row's non-zeros, rising.
        grid: the columns.
    """

    rows: Sequence[Integers]
    grid: Grid

    @property
    def count(self) -> int:
        """Number of non-zeros."""
        return sum(map(len, self.rows))

    def split(self, values: Patterns) -> list[Patterns]:
        """Split one value per non-zero into rows; rows without non-zeros are left out."""
        ends = np.cumsum([len(columns) for columns in self.rows])[:-1]
        return [part for part in np.split(values, ends) if len(part)]


class DoesNotFit(Exception):
    """The values have no such representation."""


class Values:
    """Codes the values of one tensor after the other; step sizes and tables are shared between tensors."""

    def __init__(self) -> None:
        self._steps, self._sizes, self._kinds = Steps(), Naturals(_MAX_CODE), Symbols(4)
        self._tables: list[tuple[Patterns, Patterns]] = []

    def costs(self, patterns: Patterns, nonzeros: NonZeros, form: Format) -> dict[int, float]:
        """Estimate the bits of each representation that the values have."""
        costs = {RAW: _entropy(patterns >> np.uint64(form.fraction)) + len(patterns) * form.fraction}
        listed = np.unique(patterns)
        if len(listed) <= _MAX_TABLE_SIZE:
            is_known = any(_holds(table, listed) for table in self._tables)
            costs[TABLE] = _entropy(patterns) + (0 if is_known else len(listed) * (form.bits - _idle(listed)))
        for kind, parts in ((GRID, [patterns]), (ROWS, nonzeros.split(patterns))):
            try:
                codes = np.concatenate([_on_step(part, form)[1] for part in parts])
            except DoesNotFit:
                continue
            is_alphabet = np.abs(codes).max() <= MAX_ALPHABET
            costs[kind] = _BITS_PER_STEP * len(parts) + (_entropy(codes) if is_alphabet else _elias_gamma(codes))
        return costs

    def code(self, coder: Coder, kind: int, patterns: Patterns | None, nonzeros: NonZeros, form: Format) -> Patterns:
        """Code the values of all non-zeros of a tensor, row by row; None when reading.

        Raises:
            DoesNotFit: if these values have no such representation.
        """
        code = (self._grid, self._rows, self._table, self._raw)[self._kinds.code(coder, kind)]
        return code(coder, patterns, nonzeros, form)

    def _grid(self, coder: Coder, patterns: Patterns | None, nonzeros: NonZeros, form: Format) -> Patterns:
        given, codes = _on_step(patterns, form) if patterns is not None else (_NO_STEP, None)
        step = self._steps.code(coder, given)
        codes = code_codes(coder, codes, nonzeros.rows, nonzeros.grid, self._largest(coder, codes))
        return form.nearest(step.values(codes))

    def _rows(self, coder: Coder, patterns: Patterns | None, nonzeros: NonZeros, form: Format) -> Patterns:
        given, codes = [_NO_STEP] * len(nonzeros.rows), None
        if patterns is not None:
            found = [_on_step(row, form) for row in nonzeros.split(patterns)]
            given, codes = [step for step, _ in found], np.concatenate([codes for _, codes in found])
        filled_rows = sum(len(columns) > 0 for columns in nonzeros.rows)
        steps = [self._steps.code(coder, step) for step in given[:filled_rows]]
        codes = code_codes(coder, codes, nonzeros.rows, nonzeros.grid, self._largest(coder, codes))
        parts = zip(steps, nonzeros.split(codes.view(np.uint64)), strict=True)
        return np.concatenate([form.nearest(step.values(part.view(np.int64))) for step, part in parts])

    def _table(self, coder: Coder, patterns: Patterns | None, nonzeros: NonZeros, form: Format) -> Patterns:
        negative, positive = self._choose_table(coder, patterns, form)
        codes = None
        if patterns is not None:
            ranks = np.searchsorted(negative, patterns), np.searchsorted(positive, patterns)
            codes = np.where(_is_negative(patterns, form), -1 - ranks[0], 1 + ranks[1])
        codes = code_codes(coder, codes, nonzeros.rows, nonzeros.grid, (len(negative), len(positive)))
        found = np.zeros(len(codes), np.uint64)
        found[codes > 0] = positive[codes[codes > 0] - 1]
        found[codes < 0] = negative[-codes[codes < 0] - 1]
        return found

    def _raw(self, coder: Coder, patterns: Patterns | None, nonzeros: NonZeros, form: Format) -> Patterns:
        heads = Symbols(1 << (form.bits - form.fraction))
        given = patterns.tolist() if patterns is not None else [0] * nonzeros.count
        found = [
            heads.code(coder, one >> form.fraction) << form.fraction | _code_uniform(coder, one, form.fraction)
            for one in given
        ]
        return np.array(found, np.uint64)

    def _largest(self, coder: Coder, codes: Integers | None) -> tuple[int, int]:
        """Code the largest absolute values of negative and of positive codes."""
        given = (0, 0) if codes is None else (max(-int(codes.min()), 0), max(int(codes.max()), 0))
        return self._sizes.code(coder, given[0]), self._sizes.code(coder, given[1])

    def _choose_table(self, coder: Coder, patterns: Patterns | None, form: Format) -> tuple[Patterns, Patterns]:
        """Code the index of an earlier table, or a new table.

        A table holds the negative and the positive values, each sorted by size.
        """
        wanted = np.unique(patterns) if patterns is not None else np.zeros(0, np.uint64)
        fitting = (index for index, table in enumerate(self._tables) if _holds(table, wanted))
        index = coder.uniform(next(fitting, len(self._tables)), len(self._tables) + 1)
        if index == len(self._tables):
            self._tables.append(self._new_table(coder, wanted, form))
        return self._tables[index]

    def _new_table(self, coder: Coder, wanted: Patterns, form: Format) -> tuple[Patterns, Patterns]:
        if len(wanted) > _MAX_TABLE_SIZE:
            raise DoesNotFit
        idle = coder.uniform(_idle(wanted), form.bits)
        negative = _is_negative(wanted, form)

        def entries(given: list[int], sign: int) -> Patterns:
            count = self._sizes.code(coder, len(given))
            padded = given or [0] * count
            found = [_code_uniform(coder, entry >> idle, form.bits - 1 - idle) << idle | sign for entry in padded]
            return np.array(found, np.uint64)

        return entries(wanted[negative].tolist(), 1 << (form.bits - 1)), entries(wanted[~negative].tolist(), 0)


def _on_step(patterns: Patterns, form: Format) -> tuple[Step, Integers]:
    found = common_step(form.floats(patterns))
    if found is None or np.abs(found[1]).max() > _MAX_CODE:
        raise DoesNotFit
    return found


def _entropy(symbols: NDArray[Any]) -> float:
    """Estimate the bits of adaptive symbols: entropy, and four bits for each."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum()) + 4.0 * len(counts)


def _elias_gamma(codes: Integers) -> float:
    """Estimate the bits of codes with a large alphabet: sign, length and digits."""
    digits = np.floor(np.log2(np.abs(codes)))
    return float(digits.sum()) + len(codes) + _entropy(digits)


def _holds(table: tuple[Patterns, Patterns], wanted: Patterns) -> bool:
    return bool(np.isin(wanted, np.concatenate(table)).all())


def _idle(patterns: Patterns) -> int:
    """Count the last bits that are zero in all patterns."""
    joint = int(np.bitwise_or.reduce(patterns)) if len(patterns) else 1
    return (joint & -joint).bit_length() - 1


def _is_negative(patterns: Patterns, form: Format) -> NDArray[np.bool_]:
    return (patterns >> np.uint64(form.bits - 1)).astype(np.bool_)


def _code_uniform(coder: Coder, number: int, bits: int) -> int:
    """Code the lowest bits of a number with equal probabilities."""
    found = 0
    for place in range(0, bits, _UNIFORM_BITS):
        size = min(_UNIFORM_BITS, bits - place)
        found |= coder.uniform(number >> place & (1 << size) - 1, 1 << size) << place
    return found
