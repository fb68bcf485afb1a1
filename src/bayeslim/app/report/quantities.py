"""How quantities are written for people: percentages, counts, bytes, seconds and ratios."""

from __future__ import annotations

import math

MISSING = "–"


def percent(fraction: float, digits: int = 1) -> str:
    """Write a fraction as a percentage.

    >>> percent(0.9532)
    '95.3 %'
    """
    return f"{100 * fraction:.{digits}f} %" if math.isfinite(fraction) else MISSING


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with a few significant digits, whole ones with separators.

    >>> number(0.123456), number(1234567), number(None)
    ('0.123', '1,234,567', '–')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    rounded = f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(float(rounded)) >= 10**digits else rounded


def size(count: float) -> str:
    """Write a number of bytes.

    >>> size(900), size(204_000)
    ('900 B', '204 kB')
    """
    if float(f"{count:.0f}") < 1000:
        return f"{count:.0f} B"
    for unit, scale in (("kB", 1e3), ("MB", 1e6)):
        if float(f"{count / scale:.3g}") < 1000:
            return f"{count / scale:.3g} {unit}"
    return f"{number(count / 1e9)} GB"


def duration(seconds: float) -> str:
    """Write a number of seconds.

    >>> duration(0.0000312), duration(0.25), duration(75)
    ('31.2 µs', '250 ms', '1 min 15 s')
    """
    if not math.isfinite(seconds):
        return MISSING
    for unit, scale in (("µs", 1e-6), ("ms", 1e-3)):
        if float(f"{seconds / scale:.3g}") < 1000:
            return f"{seconds / scale:.3g} {unit}"
    whole = round(seconds)
    return f"{seconds:.3g} s" if float(f"{seconds:.3g}") < 60 else f"{whole // 60} min {whole % 60} s"


def times(ratio: float) -> str:
    """Write a ratio.

    >>> times(12.04)
    '12×'
    """
    return f"{ratio:.0f}×" if ratio >= 100 else f"{ratio:.3g}×"


def shape(sizes: tuple[int, ...]) -> str:
    """Write the shape of a tensor.

    >>> shape((300, 784))
    '300×784'
    """
    return "×".join(map(str, sizes)) or "scalar"
