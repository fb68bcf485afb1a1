"""The parts of a report: figures with the numbers behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Numbers as text: headings, and rows of as many cells; the first cell of a row names it."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
        """Build a table from values, written with str."""
        return cls(tuple(headings), tuple(tuple(str(cell) for cell in row) for row in rows))


@dataclass(frozen=True)
class Figure:
    """A picture as HTML, all text escaped, with its title, caption and numbers.

    The picture is empty if it cannot be drawn.
    """

    title: str
    caption: str
    picture: str
    table: Table
