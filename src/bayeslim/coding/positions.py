"""The positions of a weight's non-zeros.

The number of non-zeros of each row comes first, then row by row their columns in rising order. With r of them still to
come, the next one is beyond column j with probability

    (W_j / W)^ρ,     ρ = 1 + γ (r − 1),

where W sums the probability weights of all remaining columns, and W_j those after j. With γ = 1 these are r independent
draws in order, and a row of k costs about log2 (W^k / k! Π w) bits at any length. Where non-zeros come in clusters, the
first of which raises the weights of the others, a smaller γ expects fewer than r clusters.

Rows that are more than an eighth full are coded column by column: with n columns left, a non-zero has the odds
r w : (n − r) W / n, which is exact for equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bayeslim.coding.adaptive import Naturals
from bayeslim.coding.coders import Coder
from bayeslim.coding.features import FEATURES, OF_THIS_ROW, ColumnFeatures
from bayeslim.coding.geometry import Integers
from bayeslim.coding.logarithms import POWER_BITS, log2, power
from bayeslim.errors import CorruptFile

GAMMAS = 8
"""γ is a multiple of 1 / GAMMAS."""

COEFFICIENTS = (0, *(3**n for n in range(14)))
"""The coefficients that a feature may have."""

DENSE_ROW_RATIO = 8
"""Rows with more than one non-zero in this many columns are coded column by column."""

_BIT_TOTAL = 1 << 16


@dataclass(frozen=True)
class ContextModel:
    """The coefficients of the features in one weight, fitted by the encoder.

    Attributes:
        choices: an index into `COEFFICIENTS` for each feature.
        gamma: γ as a multiple of 1 / GAMMAS.
    """

    choices: tuple[int, ...] = (1,) + (0,) * (FEATURES - 1)
    gamma: int = GAMMAS

    def code(self, coder: Coder) -> ContextModel:
        """Code the model itself."""
        choices = [coder.uniform(self.choices[0] - 1, len(COEFFICIENTS) - 1) + 1]
        for choice in self.choices[1:]:
            used = coder.bit(int(choice > 0), 1, 2)
            choices.append(coder.uniform(choice - 1, len(COEFFICIENTS) - 1) + 1 if used else 0)
        return ContextModel(tuple(choices), coder.uniform(self.gamma, GAMMAS + 1))

    @property
    def coefficients(self) -> Integers:
        """The coefficient of each feature."""
        return np.array([COEFFICIENTS[choice] for choice in self.choices], np.int64)


def is_sorted(rows: Sequence[Integers]) -> bool:
    """Check that rows fall in length, and among equals rise in their first column."""
    keys = [(-len(columns), int(columns[0]) if len(columns) else 0) for columns in rows]
    return keys == sorted(keys)


def code_counts(
    coder: Coder, given: Sequence[int] | None, rows: int, row_size: int, falling: bool = False
) -> list[int]:
    """Code the number of non-zeros of every row.

    Args:
        coder: the writer or reader.
        given: the numbers; None when reading.
        rows: the number of rows.
        row_size: the columns of a row.
        falling: whether the numbers never rise: then the differences of neighbours are coded, from the last row.
    """
    counts, model = [0] * (rows + 1), Naturals(row_size)
    for row in reversed(range(rows)) if falling else range(rows):
        least = counts[row + 1] if falling else 0
        more = given[row] - least if given is not None else 0
        # Of sorted numbers, the i-th differs from the next by about 1 / i of the mean (Rényi 1953).
        context = ((row + 1).bit_length(),) if falling else ()
        counts[row] = least + model.code(coder, more, *context)
    if max(counts) > row_size:
        raise CorruptFile(f"The file has a row of {row_size} entries with {max(counts)} non-zeros: it was changed.")
    return counts[:-1]


def code_columns(
    coder: Coder,
    given: Sequence[Integers] | None,
    counts: Sequence[int],
    features: ColumnFeatures,
    model: ContextModel,
    is_ordered: bool = False,
) -> list[Integers]:
    """Code the columns of every row's non-zeros, in rising order.

    Args:
        coder: the writer or reader.
        given: the columns row by row; None when reading.
        counts: the number of non-zeros of each row.
        features: of the columns, before the first row.
        model: the coefficients of the features.
        is_ordered: whether the rows are known to be in the order of `is_sorted`.
    """
    found = list[Integers]()
    for row, count in enumerate(counts):
        columns: list[int] = []
        if count:
            known = given[row].tolist() if given is not None else []
            first = int(found[-1][0]) if is_ordered and row and counts[row - 1] == count else 0
            one_row = _Row(coder, count, features, model, first)
            is_dense = count * DENSE_ROW_RATIO > features.grid.size
            columns = one_row.code_dense(known) if is_dense else one_row.code_sparse(known)
            features.end_row(columns)
        found.append(np.array(columns, np.int64))
    return found


class _Row:
    """The columns of one row's non-zeros, in the two ways of coding them."""

    def __init__(self, coder: Coder, count: int, features: ColumnFeatures, model: ContextModel, first: int):
        self.coder, self.count, self.features, self.gamma, self.first = coder, count, features, model.gamma, first
        self.coefficients = model.coefficients
        self.size, self.weights = features.grid.size, features.weights(self.coefficients)
        self.changes = bool(self.coefficients[OF_THIS_ROW].any())

    def code_sparse(self, known: list[int]) -> list[int]:
        columns, column, tails = list[int](), self.first, _tails(self.weights)
        for left in range(self.count, 0, -1):
            choices = self.size - column - left + 1
            gap = known[self.count - left] - column if known else 0
            column += self.coder.symbol(gap, self._starts(tails[column : column + choices], left), choices)
            columns.append(column)
            if self.changes and left > 1:
                self.features.add_nonzero(column)
                tails = _tails(self.features.weights(self.coefficients))
            column += 1
        return columns

    def code_dense(self, known: list[int]) -> list[int]:
        columns, chosen, tails = list[int](), set(known), _tails(self.weights)
        for column in range(self.first, self.size):
            left, open_ = self.count - len(columns), self.size - column
            if left == open_:  # all remaining columns are non-zero
                columns += range(column, self.size)
            if left in (0, open_):
                break
            weight, rest = int(self.weights[column]), int(tails[column])
            odds = left * weight * open_
            ones = _BIT_TOTAL * odds // (odds + (open_ - left) * rest)
            if self.coder.bit(int(column in chosen), min(max(ones, 1), _BIT_TOTAL - 1), _BIT_TOTAL):
                columns.append(column)
                if self.changes:
                    self.features.add_nonzero(column)
                    self.weights = self.features.weights(self.coefficients)
                    tails = _tails(self.weights)
        return columns

    def _starts(self, tails: Integers, left: int) -> Callable[[int], int]:
        rho, whole, choices = GAMMAS + self.gamma * (left - 1), log2(int(tails[0])), len(tails)

        def starts(gap: int) -> int:
            # Adding the gap itself gives every column a share of at least one.
            beyond = power(rho * (whole - log2(int(tails[gap]))) // GAMMAS) if gap < choices else 0
            return (1 << POWER_BITS) - beyond + gap

        return starts


def _tails(weights: Integers) -> Integers:
    """Sum the weights from each column to the last."""
    tails: Integers = np.cumsum(weights[::-1])[::-1]
    return tails
