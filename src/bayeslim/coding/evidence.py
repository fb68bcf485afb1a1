"""What is known of the columns of a weight before, and while, a row of it is coded.

A column is likelier to hold a non-zero where others are: every non-zero adds to features of the columns around it.

* expected: the posterior's hill (`hill.py`), or 1 everywhere;
* alive, feeder: whether the unit that feeds the column reads anything, and how many entries it reads;
* column, beside, channel, place: earlier rows' non-zeros in the column, next to it, in its channel, at its place;
* right, below, corner: this row's non-zeros whose neighbour in that direction it is;
* popular: those to the right and below, times the earlier rows' non-zeros in the column and next to it;
* same channel, same place: this row's non-zeros in its channel, or at its place.

A column's weight is the sum of its features, each times its worth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bayeslim.coding.geometry import Grid, Integers
from bayeslim.coding.hill import Hill

FEATURES = 13
EXPECTED, ALIVE, FEEDER, COLUMN, BESIDE, CHANNEL, PLACE = range(7)
RIGHT, BELOW, CORNER, POPULAR, SAME_CHANNEL, SAME_PLACE = range(7, FEATURES)
HERE = slice(RIGHT, None)
"""The features that change within a row."""


class Evidence:
    """The features of every column.

    Args:
        grid: the columns.
        feeders: how many entries the unit that feeds each column reads, if that is known.
        hill: where non-zeros are expected; everywhere alike if not given.

    Attributes:
        values: (features, columns).
    """

    def __init__(self, grid: Grid, feeders: Integers | None, hill: Hill | None = None):
        self.grid = grid
        self.values = np.zeros((FEATURES, grid.size), np.int64)
        self.values[EXPECTED] = 1 if hill is None else hill.heights(grid)
        if feeders is not None:
            self.values[ALIVE] = feeders > 0
            self.values[FEEDER] = feeders

    def weights(self, worths: Integers) -> Integers:
        """The columns' weights, of all features or the part of them that has worths."""
        used = np.flatnonzero(worths)
        weights: Integers = worths[used] @ self.values[used]
        return weights

    def touch(self, column: int) -> None:
        """Add a non-zero of this row: what it says of the columns after it."""
        values, grid, area = self.values, self.grid, self.grid.area
        right, below = grid.at(column, ((0, 1),)), grid.at(column, ((1, -1), (1, 0)))
        values[RIGHT, right] += 1
        values[BELOW, below] += 1
        values[CORNER, grid.at(column, ((1, 1),))] += 1
        values[POPULAR, right + below] += values[COLUMN : BESIDE + 1, right + below].sum(0)
        values[SAME_CHANNEL, column + 1 : column - column % area + area] += 1
        values[SAME_PLACE, column + area :: area] += 1

    def leave(self, columns: Sequence[int] | Integers) -> None:
        """End a row, with its non-zeros."""
        grid = self.grid
        self.values[HERE] = 0
        pictures = np.zeros((grid.channels, grid.height, grid.width), np.int64)
        pictures.reshape(-1)[columns] = 1
        column, beside, channel, place = self.values[COLUMN : PLACE + 1].reshape(-1, *pictures.shape)
        column += pictures
        beside[:, :, 1:] += pictures[:, :, :-1]
        beside[:, :, :-1] += pictures[:, :, 1:]
        beside[:, 1:] += pictures[:, :-1]
        beside[:, :-1] += pictures[:, 1:]
        channel += pictures.sum((1, 2), keepdims=True)
        place += pictures.sum(0)
