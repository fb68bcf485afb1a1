"""Axes: from values to places in a drawing, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bayeslim.app.report.quantities import percent
from bayeslim.app.report.svg import FONT, Drawing, Point

Tick = tuple[float, str]


@dataclass(frozen=True)
class Scale:
    """A map from values in `low` to `high` to places in `start` to `end`; others go to the nearer end.

    Attributes:
        low: the value at the start.
        high: the value at the end.
        start: a place.
        end: a place.
        warp: the function that is linear along the axis: the value itself, its logarithm, ...
    """

    low: float
    high: float
    start: float
    end: float
    warp: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        """Compute the place of a value."""
        inside = min(max(value, self.low), self.high)
        low, high = self.warp(self.low), self.warp(self.high)
        share = (self.warp(inside) - low) / (high - low) if high > low else 0.0
        return self.start + share * (self.end - self.start)


def even_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """List round numbers between two values.

    >>> even_ticks(0, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) + 0.0 for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """List round numbers between two positive values far apart.

    >>> log_ticks(1.5, 60)
    [2.0, 5.0, 10.0, 20.0, 50.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) <= 4 else (1,)
    stride = max(1, len(powers) // 8)
    every = [float(f"{s}e{k}") for k in powers for s in steps if k % stride == 0]
    return [value for value in every if low * 0.999 <= value <= high * 1.001]


def weights_gone(sparsity: float) -> float:
    """Warp sparsities: every halving of the remaining weights is one step."""
    return -math.log(max(1 - sparsity, 1e-12))


def sparsity_ticks(high: float) -> list[Tick]:
    """List the ticks of a sparsity axis that ends at `high`."""
    shares = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
    return [(s, percent(s, 0 if s < 0.995 else 1)) for s in shares if s <= high + 1e-9]


class Frame:
    """A plotting area with a horizontal and a vertical axis.

    Args:
        drawing: to draw into.
        x: the horizontal scale.
        y: the vertical one; it starts at the bottom.
    """

    def __init__(self, drawing: Drawing, x: Scale, y: Scale):
        self.drawing, self.x, self.y = drawing, x, y

    def x_axis(self, ticks: Iterable[Tick], label: str) -> None:
        """Draw the horizontal axis below the area."""
        base = self.y.start
        self.drawing.line((self.x.start, base), (self.x.end, base), "axis")
        for value, words in ticks:
            place = self.x(value)
            self.drawing.line((place, base), (place, base + 4), "axis")
            self.drawing.text((place, base + 5 + FONT), words, "tick", "middle")
        self.drawing.text(((self.x.start + self.x.end) / 2, base + 10 + 2 * FONT), label, "label", "middle")

    def y_axis(self, ticks: Iterable[Tick], label: str, right: bool = False) -> None:
        """Draw the vertical axis, with lines across the area if it is the left one."""
        side = self.x.end if right else self.x.start
        for value, words in ticks:
            place = self.y(value)
            if not right:
                self.drawing.line((self.x.start, place), (self.x.end, place), "grid")
            self.drawing.text((side + (6 if right else -6), place + 4), words, "tick", "start" if right else "end")
        middle = (self.y.start + self.y.end) / 2
        place = self.drawing.width - 3.0 if right else FONT
        self.drawing.text((place, middle), label, "label", "middle", turned=True)

    def at(self, x: float, y: float) -> Point:
        """Compute the place of a pair of values."""
        return self.x(x), self.y(y)

    def curve(self, points: Sequence[Point], class_: str, dots: bool = False) -> None:
        """Draw a line through pairs of values, with or without dots."""
        places = [self.at(*point) for point in points]
        self.drawing.polyline(places, f"curve {class_}")
        for place in places if dots else ():
            self.drawing.dot(place, 2.2, f"point {class_}")

    def bar(self, left: float, right: float, bottom: float, top: float, class_: str, gap: float = 0.6) -> None:
        """Draw a bar between two values of x and two of y."""
        x0, x1, y0, y1 = self.x(left), self.x(right), self.y(bottom), self.y(top)
        self.drawing.rect((x0 + gap / 2, y1), (max(x1 - x0 - gap, 0.2), y0 - y1), class_)

    def vertical(self, value: float, words: str, at_top: bool = True, to_right: bool | None = None) -> None:
        """Draw a vertical line at a value of x, with words beside one end."""
        place, level = self.x(value), self.y.end + FONT if at_top else self.y.start - 7
        self.drawing.line((place, self.y.start), (place, self.y.end), "cutoff")
        if to_right is None:
            to_right = place < (self.x.start + self.x.end) / 2
        side, anchor = (5, "start") if to_right else (-5, "end")
        self.drawing.text((place + side, level), words, "note", anchor)
