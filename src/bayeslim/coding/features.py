"""Features of the columns of a weight: the context of the next non-zero's position.

A column is more likely to hold a non-zero where others are. Every non-zero adds to features of the columns around it:

* constant: 1 everywhere;
* alive, feeder: whether the unit that feeds the column reads any entry, and how many it reads;
* column, beside, channel, place: non-zeros of earlier rows in the column, next to it, in its channel, at its place;
* right, below, corner: non-zeros of this row that have the column as their neighbour in that direction;
* popular: right plus below, times the earlier rows' non-zeros in the column and next to it;
* same channel, same place: non-zeros of this row in the column's channel, or at its place.

The probability weight of a column is the sum of its features times their coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bayeslim.coding.geometry import Grid, Integers

FEATURES = 13
CONSTANT, ALIVE, FEEDER, COLUMN, BESIDE, CHANNEL, PLACE = range(7)
RIGHT, BELOW, CORNER, POPULAR, SAME_CHANNEL, SAME_PLACE = range(7, FEATURES)
OF_THIS_ROW = slice(RIGHT, None)
"""The features that change within a row."""


class ColumnFeatures:
    """The features of every column of a weight.

    Attributes:
        values: (features, columns).
    """

    def __init__(self, grid: Grid, feeders: Integers | None):
        self.grid = grid
        self.values = np.zeros((FEATURES, grid.size), np.int64)
        self.values[CONSTANT] = 1
        if feeders is not None:
            self.values[ALIVE] = feeders > 0
            self.values[FEEDER] = feeders

    def weights(self, coefficients: Integers) -> Integers:
        """Compute the probability weight of every column."""
        used = np.flatnonzero(coefficients)
        weights: Integers = coefficients[used] @ self.values[used]
        return weights

    def add_nonzero(self, column: int) -> None:
        """Update the features of later columns after a non-zero of this row."""
        values, grid, area = self.values, self.grid, self.grid.area
        right, below = grid.at(column, ((0, 1),)), grid.at(column, ((1, -1), (1, 0)))
        values[RIGHT, right] += 1
        values[BELOW, below] += 1
        values[CORNER, grid.at(column, ((1, 1),))] += 1
        values[POPULAR, right + below] += values[COLUMN : BESIDE + 1, right + below].sum(0)
        values[SAME_CHANNEL, column + 1 : column - column % area + area] += 1
        values[SAME_PLACE, column + area :: area] += 1

    def end_row(self, columns: Sequence[int] | Integers) -> None:
        """Clear this row's features and add its non-zeros to those of earlier rows."""
        grid = self.grid
        self.values[OF_THIS_ROW] = 0
        images = np.zeros((grid.channels, grid.height, grid.width), np.int64)
        images.reshape(-1)[columns] = 1
        column, beside, channel, place = self.values[COLUMN : PLACE + 1].reshape(-1, *images.shape)
        column += images
        beside[:, :, 1:] += images[:, :, :-1]
        beside[:, :, :-1] += images[:, :, 1:]
        beside[:, 1:] += images[:, :-1]
        beside[:, :-1] += images[:, 1:]
        channel += images.sum((1, 2), keepdims=True)
        place += images.sum(0)
