"""Where a weight's non-zeros are expected, and what the features of its columns are worth: for the fewest bits.

One pass gathers, for a part of the rows, the features of the columns that were chosen and of all that could have been;
then the cost of any worths is a few products of small matrices, and one worth at a time is improved until none can be.
Hills are tried in turn on the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bayeslim.coding.coders import Meter
from bayeslim.coding.evidence import EXPECTED, FEATURES, Evidence
from bayeslim.coding.expected import Masses
from bayeslim.coding.geometry import Grid, Integers
from bayeslim.coding.hill import Hill, closest_hills
from bayeslim.coding.positions import GAMMAS, WORTHS, Taste

_MOST = 4096
_START = 6
_BITS_OF_A_WORTH = 4.0
_LEAST_SHARE = 2.0**-28
_LARGEST_SUM = 2.0**56


@dataclass(frozen=True)
class Choices:
    """Non-zeros as choices among columns, (choices, features) each but `left`.

    Attributes:
        all: features summed over the columns that were left.
        beyond: summed over the chosen column and those after it.
        chosen: of the chosen column.
        left: how many were still to come, itself included.
        scale: how many non-zeros each of them stands for.
        first: the first column that was left, (choices,).
        column: the chosen one, likewise.
    """

    all: NDArray[np.float64]
    beyond: NDArray[np.float64]
    chosen: NDArray[np.float64]
    left: NDArray[np.float64]
    scale: float
    first: Integers
    column: Integers

    def under(self, heights: Integers) -> Choices:
        """The same choices where another hill is expected: no other feature depends on it."""
        tails = np.append(np.cumsum(heights[::-1])[::-1], 0).astype(float)
        expected = tails[self.first], tails[self.column], heights[self.column]
        tables = [table.copy() for table in (self.all, self.beyond, self.chosen)]
        for table, values in zip(tables, expected, strict=True):
            table[:, EXPECTED] = values
        return replace(self, all=tables[0], beyond=tables[1], chosen=tables[2])

    def bits(self, taste: Taste) -> float:
        """About what the columns cost."""
        worths = taste.values.astype(float)
        all_ = self.all @ worths
        if all_.max(initial=0.0) > _LARGEST_SUM:
            return math.inf
        beyond = self.beyond @ worths / all_
        after = np.maximum(beyond - self.chosen @ worths / all_, 0.0)
        rho = 1 + (self.left - 1) * (taste.gamma / GAMMAS)
        shares = np.maximum(beyond**rho - after**rho, _LEAST_SHARE)
        extra = _BITS_OF_A_WORTH * sum(worth > 0 for worth in taste.worths[1:])
        return float(-np.log2(shares).sum()) * self.scale + extra


def best_start(
    hits: Sequence[Integers], grid: Grid, feeders: Integers | None, expected: Masses
) -> tuple[Hill | None, Taste]:
    """The hill, or none, with the worths beside it, of those that are closest to how many non-zeros columns expect."""
    best: tuple[Hill | None, Taste] = None, Taste()
    least, choices = math.inf, gather(hits, Evidence(grid, feeders))
    for hill in (None, *closest_hills(expected, grid)):
        taste, bits = best_taste(choices if hill is None else choices.under(hill.heights(grid)))
        meter = Meter()
        if hill is not None:
            hill.code(meter, grid)
        if bits + meter.bits < least:
            best, least = (hill, taste), bits + meter.bits
    return best


def gather(hits: Sequence[Integers], evidence: Evidence) -> Choices:
    """The choices made in a weight whose rows have non-zeros in the columns `hits`; at most a few thousand of them.

    There is nothing to choose in rows that are full.
    """
    size = evidence.grid.size
    choosing = [row for row, columns in enumerate(hits) if 0 < len(columns) < size]
    total = sum(len(hits[row]) for row in choosing)
    looked_at = set(choosing[:: max(1, -(-total // _MOST))])
    found: list[list[float]] = []
    for row, columns in enumerate(hits):
        first = 0
        for place, column in enumerate(columns.tolist() if row in looked_at else ()):
            values = evidence.values
            beyond = values[:, column:].sum(1)
            all_ = values[:, first:column].sum(1) + beyond
            found.append([*all_, *beyond, *values[:, column], len(columns) - place, first, column])
            evidence.touch(column)
            first = column + 1
        if len(columns):
            evidence.leave(columns)
    table = np.array(found, np.float64).reshape(len(found), 3 * FEATURES + 3)
    every, beyond, chosen, ends = np.split(table, [FEATURES, 2 * FEATURES, 3 * FEATURES], axis=1)
    left, firsts, columns = ends.T
    scale = total / max(len(found), 1)
    return Choices(every, beyond, chosen, left, scale, firsts.astype(np.int64), columns.astype(np.int64))


def best_taste(choices: Choices) -> tuple[Taste, float]:
    """The worths that cost the fewest bits, found one at a time, and those bits."""
    best = Taste((_START, *Taste().worths[1:]))
    least = choices.bits(best)
    used = [feature for feature in range(FEATURES) if choices.chosen[:, feature].any()]
    before = float("inf")
    while least < before:
        before = least
        for feature in (*used, None):
            least, best = min(
                ((choices.bits(taste), taste) for taste in _changes(best, feature)), key=lambda found: found[0]
            )
    return best, least


def _changes(taste: Taste, feature: int | None) -> list[Taste]:
    """The taste with every worth of one feature, or with every γ; itself first."""
    if feature is None:
        return [taste, *(Taste(taste.worths, gamma) for gamma in range(GAMMAS + 1))]
    worths = range(int(feature == EXPECTED), len(WORTHS))
    return [
        taste,
        *(Taste((*taste.worths[:feature], worth, *taste.worths[feature + 1 :]), taste.gamma) for worth in worths),
    ]
