"""Where to expect non-zeros before any was coded: the posterior's own probabilities, as a hill over a picture.

The posterior says of every weight how probable it is that it is not zero (`Quantised.presence`); summed over rows, how
many non-zeros each column is to have. The writer knows it and the reader does not, and the whole map would take more
bytes than it saves. So the file holds the five numbers of the hill that is closest to it,

    P(line y, place x) ∝ 2^(−d^s),     d² = ((y − cy) / hy)² + ((x − cx) / hx)²,

for the middle of an image is what is read, or none where it is flat. The hill is what the weights of columns start
from; what is coded adds to it (`evidence.py`). A plain network has no posterior, and its own non-zeros take the place
of the posterior's probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bayeslim.coding.coders import Coder
from bayeslim.coding.expected import Masses
from bayeslim.coding.geometry import Grid, Integers
from bayeslim.coding.logarithms import ONE, POWER_BITS, power, powers

TOP_BITS = 8
"""A hill is 2 to this at its top, and at least 1."""

STEEPNESSES = 3
"""s is 2, 4 or 8."""

WIDTHS = 16
"""How many h there are along an axis: from its length downwards, three of them to a halving."""

_FRACTION = 16
_FOOT = 8
"""So many h from its top, a hill is at its foot."""
_FLAT = _FOOT**2 << _FRACTION
_STRIDES = (-4, -1, 1, 4)


@dataclass(frozen=True)
class Slope:
    """A hill along one axis.

    Attributes:
        centre: twice the place of its top.
        width: how many thirds of a halving h is less than the length of the axis.
    """

    centre: int = 0
    width: int = 0

    def code(self, coder: Coder, length: int) -> Slope:
        """Pass it through a coder."""
        return Slope(coder.uniform(self.centre, 2 * length - 1), coder.uniform(self.width, WIDTHS))

    def squares(self, length: int) -> Integers:
        """((t − c) / h)² of every place t, in parts of 2^_FRACTION."""
        half = max(1, 2 * length * power(self.width * ONE // 3) >> POWER_BITS)
        away = np.minimum(np.abs(2 * np.arange(length, dtype=np.int64) - self.centre), _FOOT * half)
        squares: Integers = (away * away << _FRACTION) // (half * half)
        return squares

    def neighbours(self, length: int) -> Iterator[Slope]:
        """Those that differ in one number."""
        yield from (replace(self, width=width) for width in range(WIDTHS))
        yield from (replace(self, centre=min(max(self.centre + by, 0), 2 * length - 2)) for by in _STRIDES)


@dataclass(frozen=True)
class Hill:
    """How probable non-zeros are over the lines and places of a picture."""

    lines: Slope = Slope()
    places: Slope = Slope()
    steepness: int = 0

    def code(self, coder: Coder, grid: Grid) -> Hill:
        """Pass it through a coder."""
        lines, places = self.lines.code(coder, grid.height), self.places.code(coder, grid.width)
        return Hill(lines, places, coder.uniform(self.steepness, STEEPNESSES))

    def heights(self, grid: Grid) -> Integers:
        """The hill at every column of a grid, the same in all channels."""
        fall = (self.lines.squares(grid.height)[:, None] + self.places.squares(grid.width)).reshape(-1)
        fall = np.minimum(fall, _FLAT)
        for _ in range(self.steepness):
            fall = np.minimum(fall * fall >> _FRACTION, _FLAT)
        heights = np.maximum(powers(fall * ONE >> _FRACTION) >> (POWER_BITS - TOP_BITS), 1)
        return np.tile(heights, grid.channels)

    def neighbours(self, grid: Grid) -> Iterator[Hill]:
        """Those that differ in one number, but as steep."""
        yield from (replace(self, lines=lines) for lines in self.lines.neighbours(grid.height))
        yield from (replace(self, places=places) for places in self.places.neighbours(grid.width))


def closest_hills(expected: Masses, grid: Grid) -> list[Hill]:
    """Of every steepness the hill with the least cross-entropy to what the columns expect; none without a picture."""
    picture = expected.reshape(grid.channels, grid.height, grid.width).sum(0)
    if grid.area == 1 or not picture.any():
        return []
    lines, places = (_around(picture.sum(axis)) for axis in (1, 0))
    one = Grid(1, grid.height, grid.width)
    return [_climb(picture.reshape(-1), one, Hill(lines, places, steepness)) for steepness in range(STEEPNESSES)]


def _around(masses: Masses) -> Slope:
    """A slope that starts about where the mass is."""
    return Slope(round(2 * float(masses @ np.arange(len(masses)) / masses.sum())), WIDTHS // 4)


def _climb(picture: Masses, grid: Grid, start: Hill) -> Hill:
    """One number after the other, until none makes it closer."""

    def distance(hill: Hill) -> float:
        heights = hill.heights(grid)
        return -float(picture @ np.log2(heights / heights.sum()))

    best, least, before = start, distance(start), np.inf
    while least < before:
        before = least
        for hill in best.neighbours(grid):
            if (found := distance(hill)) < least:
                best, least = hill, found
    return best
