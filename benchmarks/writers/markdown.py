"""Tables and numbers as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Sequence[object]


def table(headings: Row, rows: Iterable[Row]) -> str:
    """Write a table."""
    body = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in body)


def listed(values: Iterable[float], digits: int) -> str:
    """Write numbers with slashes between them."""
    return " / ".join(f"{value:.{digits}f}" for value in values)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Write the mean, and the standard deviation of several values."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def mean_and_std(found: Mapping[str, Any], digits: int = 2) -> str:
    """Write a mean and a standard deviation that were saved."""
    return f"{found['mean']:.{digits}f} ± {found['std']:.{digits}f}"
