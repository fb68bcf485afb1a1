"""Which entries of a weight are not zero.

First comes how many entries of each row are not zero (`crowd.py`), then row by row where they are, in rising order.
With r of them still to come the next is beyond column j with probability

    (W_j / W)^ρ,     ρ = 1 + γ (r − 1),

where W sums the weights of all columns left, and W_j of those after j. With γ = 1 these are r independent draws in
order, and a row of k costs about log2 (W^k / k! Π w) bits, whatever its length; where non-zeros come in clusters, whose
first member raises the weights of the next, a smaller γ says that fewer than r clusters are to come.

Rows that are more than an eighth full are coded column by column: with n columns left, a non-zero has the odds
r w : (n − r) W / n, which is exact for equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bayeslim.coding.adaptive import Naturals
from bayeslim.coding.coders import Coder
from bayeslim.coding.crowd import Crowd
from bayeslim.coding.evidence import FEATURES, HERE, Evidence
from bayeslim.coding.geometry import Integers
from bayeslim.coding.logarithms import POWER_BITS, log2, power
from bayeslim.errors import CorruptFile

GAMMAS = 8
"""γ is a multiple of one part in this."""

WORTHS = (0, *(3**n for n in range(14)))
"""What a feature may be worth."""

DENSE = 8
"""Rows with more than one non-zero in this many columns are coded column by column."""

_BIT = 1 << 16
_BACKING = 16
"""How many observations it is worth what sorted rows are expected to have more than the next."""


@dataclass(frozen=True)
class Taste:
    """What the features are worth in one weight, as chosen by the writer.

    Attributes:
        worths: places in `WORTHS`.
        gamma: in parts of `GAMMAS`.
    """

    worths: tuple[int, ...] = (1,) + (0,) * (FEATURES - 1)
    gamma: int = GAMMAS

    def code(self, coder: Coder) -> Taste:
        """Pass it through a coder."""
        worths = [coder.uniform(self.worths[0] - 1, len(WORTHS) - 1) + 1]
        for worth in self.worths[1:]:
            used = coder.bit(int(worth > 0), 1, 2)
            worths.append(coder.uniform(worth - 1, len(WORTHS) - 1) + 1 if used else 0)
        return Taste(tuple(worths), coder.uniform(self.gamma, GAMMAS + 1))

    @property
    def values(self) -> Integers:
        """What each feature is worth."""
        return np.array([WORTHS[worth] for worth in self.worths], np.int64)


def is_sorted(hits: Sequence[Integers]) -> bool:
    """Whether rows have ever fewer non-zeros, and of those with equally many the first one ever later."""
    keys = [(-len(columns), int(columns[0]) if len(columns) else 0) for columns in hits]
    return keys == sorted(keys)


def code_counts(
    coder: Coder, given: Sequence[int] | None, rows: int, most: int, crowd: Crowd, falling: bool = False
) -> list[int]:
    """Pass the numbers of non-zeros of all rows through a coder.

    Args:
        coder: which way.
        given: the numbers; None when reading.
        rows: how many rows there are.
        most: the columns of a row.
        crowd: how many are expected.
        falling: whether they are known to fall: then each is coded as how many more it is than the next, from the last.
    """
    counts, model = [0] * (rows + 1), Naturals(most)
    for row in reversed(range(rows)) if falling else range(rows):
        least = counts[row + 1] if falling else 0
        bits, backing = (crowd.bits_of_more(row + 1), _BACKING) if falling else (crowd.bits, 1)
        more = given[row] - least if given is not None else 0
        counts[row] = least + model.code(coder, more, bits_a_step=bits, backing=backing)
    if max(counts) > most:
        raise CorruptFile(f"The file counts {max(counts)} non-zeros in rows of {most}.")
    return counts[:-1]


def code_columns(
    coder: Coder,
    given: Sequence[Integers] | None,
    counts: Sequence[int],
    evidence: Evidence,
    taste: Taste,
    ordered: bool = False,
) -> list[Integers]:
    """Pass the columns of all rows' non-zeros, rising, through a coder.

    Args:
        coder: which way.
        given: the columns row by row; None when reading.
        counts: how many there are in each row.
        evidence: of the columns, before the first row.
        taste: what its features are worth.
        ordered: whether the rows are known to be in the order of `is_sorted`.
    """
    worths, found = taste.values, list[Integers]()
    for row, count in enumerate(counts):
        columns: list[int] = []
        if count:
            known = given[row].tolist() if given is not None else []
            first = int(found[-1][0]) if ordered and row and counts[row - 1] == count else 0
            one_row = _Row(coder, count, evidence, worths, taste.gamma, first)
            columns = one_row.dense(known) if count * DENSE > evidence.grid.size else one_row.sparse(known)
            evidence.leave(columns)
        found.append(np.array(columns, np.int64))
    return found


class _Row:
    """One row on its way through a coder."""

    def __init__(self, coder: Coder, count: int, evidence: Evidence, worths: Integers, gamma: int, first: int):
        self.coder, self.count, self.evidence, self.worths, self.gamma = coder, count, evidence, worths, gamma
        self.first = first
        self.size, self.weights = evidence.grid.size, evidence.weights(worths)
        self.changes = bool(worths[HERE].any())

    def sparse(self, known: list[int]) -> list[int]:
        columns, column, tails = list[int](), self.first, _tails(self.weights)
        for left in range(self.count, 0, -1):
            choices = self.size - column - left + 1
            gap = known[self.count - left] - column if known else 0
            column += self.coder.symbol(gap, self._starts(tails[column : column + choices], left), choices)
            columns.append(column)
            if self.changes and left > 1:
                self.evidence.touch(column)
                tails = _tails(self.evidence.weights(self.worths))
            column += 1
        return columns

    def dense(self, known: list[int]) -> list[int]:
        columns, chosen, tails = list[int](), set(known), _tails(self.weights)
        for column in range(self.first, self.size):
            left, open_ = self.count - len(columns), self.size - column
            if left == open_:  # all that is left is taken, and nothing need be said
                columns += range(column, self.size)
            if left in (0, open_):
                break
            weight, rest = int(self.weights[column]), int(tails[column])
            odds = left * weight * open_
            ones = _BIT * odds // (odds + (open_ - left) * rest)
            if self.coder.bit(int(column in chosen), min(max(ones, 1), _BIT - 1), _BIT):
                columns.append(column)
                if self.changes:
                    self.evidence.touch(column)
                    self.weights = self.evidence.weights(self.worths)
                    tails = _tails(self.weights)
        return columns

    def _starts(self, tails: Integers, left: int) -> Callable[[int], int]:
        rho, whole, choices = GAMMAS + self.gamma * (left - 1), log2(int(tails[0])), len(tails)

        def starts(gap: int) -> int:
            # A part of the gap itself leaves every column at least one share.
            beyond = power(rho * (whole - log2(int(tails[gap]))) // GAMMAS) if gap < choices else 0
            return (1 << POWER_BITS) - beyond + gap

        return starts


def _tails(weights: Integers) -> Integers:
    tails: Integers = np.cumsum(weights[::-1])[::-1]
    return tails
