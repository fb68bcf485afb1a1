"""The layout of a weight: its rows are units, its columns the channels and places that the units read.

The layout is not stored: it follows from the shapes of a network's tensors, in their order. A wrong guess (a square
number of inputs that are not an image, a layer that does not read the one before it) costs bits, never correctness.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_MIN_IMAGE_SIDE = 4
_COLOUR_CHANNELS = 3


@dataclass(frozen=True)
class Grid:
    """The columns of a weight, numbered channel by channel, line by line.

    Attributes:
        channels: the number of images.
        height: lines of an image.
        width: places in a line.
    """

    channels: int
    height: int = 1
    width: int = 1

    @property
    def size(self) -> int:
        """Number of columns."""
        return self.channels * self.height * self.width

    @property
    def area(self) -> int:
        """Number of columns in a channel."""
        return self.height * self.width

    def at(self, column: int, steps: Iterable[tuple[int, int]]) -> list[int]:
        """List the columns that are the given lines and places away and inside the image.

        >>> Grid(2, 3, 3).at(9, [(0, 1), (1, 0), (-1, 0)])
        [10, 12]
        """
        line, place = divmod(column % self.area, self.width)
        return [
            column + down * self.width + right
            for down, right in steps
            if 0 <= line + down < self.height and 0 <= place + right < self.width
        ]


@dataclass(frozen=True)
class Layout:
    """A weight as a matrix.

    Attributes:
        rows: the number of units.
        columns: the inputs that they read.
        reads_previous: whether the columns' channels are the units of the weight before.
    """

    rows: int
    columns: Grid
    reads_previous: bool


def layouts(shapes: Sequence[Sequence[int]]) -> list[Layout]:
    """Lay out a network's weights, its tensors of two dimensions or more, in order."""
    found: list[Layout] = []
    for shape in shapes:
        found.append(Layout(shape[0], *_columns(shape, found[-1].rows if found else 0)))
    return found


def _columns(shape: Sequence[int], units: int) -> tuple[Grid, bool]:
    """Find the grid of columns, and whether its channels are the units before."""
    if len(shape) > 2:
        return Grid(shape[1], math.prod(shape[2:-1]), shape[-1]), shape[1] == units
    columns = shape[1]
    if units and columns and columns % units == 0:
        return Grid(units, *_image(columns // units)), True
    for channels in (1, _COLOUR_CHANNELS):
        side = math.isqrt(columns // channels)
        if channels * side * side == columns and side >= _MIN_IMAGE_SIDE:
            return Grid(channels, side, side), False
    return Grid(columns), False


def _image(area: int) -> tuple[int, int]:
    side = math.isqrt(area)
    return (side, side) if side * side == area else (1, area)
