"""Pictures as text: a drawing is a list of SVG elements, coloured by the classes of the page's style sheet.

A drawing has a title and a description, which screen readers speak in place of the picture.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape

FONT = 12.0
"""Height of the text in a drawing, in its own units."""
_LETTER = 0.53
"""Mean width of a letter as a fraction of its height."""

Point = tuple[float, float]
_numbers = itertools.count(1)


class Drawing:
    """An SVG image that takes the width it is given.

    Args:
        width: of the coordinate system.
        height: of the coordinate system.
        title: a short name.
        description: the content, for readers who cannot see it.
    """

    def __init__(self, width: float, height: float, title: str, description: str):
        self.width, self.height = width, height
        self.title, self.description = title, description
        self._parts: list[str] = []

    def add(self, tag: str, content: str | None = None, **attributes: object) -> None:
        """Add an element, with its content as escaped text.

        Underscores in attribute names become hyphens, and `class_` becomes `class`.
        """
        written = "".join(
            f' {name.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
            for name, value in attributes.items()
            if value is not None
        )
        self._parts.append(f"<{tag}{written}/>" if content is None else f"<{tag}{written}>{escape(content)}</{tag}>")

    def line(self, start: Point, end: Point, class_: str) -> None:
        """Draw a straight line."""
        self.add("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], class_=class_)

    def polyline(self, points: Iterable[Point], class_: str) -> None:
        """Draw a line through points."""
        self.add("polyline", points=" ".join(f"{_text(x)},{_text(y)}" for x, y in points), class_=class_)

    def rect(self, corner: Point, extent: Point, class_: str) -> None:
        """Draw a rectangle from its upper left corner; nothing if it has no area."""
        if extent[0] > 0 and extent[1] > 0:
            self.add("rect", x=corner[0], y=corner[1], width=extent[0], height=extent[1], class_=class_)

    def dot(self, centre: Point, radius: float, class_: str) -> None:
        """Draw a disc."""
        self.add("circle", cx=centre[0], cy=centre[1], r=radius, class_=class_)

    def text(self, place: Point, words: str, class_: str = "", anchor: str = "start", turned: bool = False) -> None:
        """Write a line of text at its baseline."""
        turn = f"rotate(-90 {_text(place[0])} {_text(place[1])})" if turned else None
        self.add("text", words, x=place[0], y=place[1], class_=class_ or None, text_anchor=anchor, transform=turn)

    def image(self, corner: Point, extent: Point, source: str) -> None:
        """Place a bitmap, with sharp pixels."""
        self.add(
            "image", x=corner[0], y=corner[1], width=extent[0], height=extent[1], href=source,
            preserveAspectRatio="none", class_="pixels",
        )  # fmt: skip

    def legend(self, entries: Sequence[tuple[str, str]], corner: Point, width: float) -> float:
        """Draw names beside their marks in rows of at most `width`; return the height.

        Args:
            entries: (class, name); a class with "area" gets a square, others a line.
            corner: the upper left corner.
            width: of a row.
        """
        x, y = 0.0, FONT
        for class_, name in entries:
            needed = 22 + text_width(name) + 14
            if x and x + needed > width:
                x, y = 0.0, y + FONT + 5
            left, base = corner[0] + x, corner[1] + y
            if "area" in class_.split():
                self.rect((left, base - 8), (16, 8), class_)
            elif "mark" in class_.split():
                self.dot((left + 8, base - 4), 4, class_)
            else:
                self.line((left, base - 4), (left + 16, base - 4), class_)
            self.text((left + 21, base), name)
            x += needed
        return y + 6

    def render(self) -> str:
        """Render the drawing as SVG."""
        name = f"drawing-{next(_numbers)}"
        head = (
            f'<svg viewBox="0 0 {_text(self.width)} {_text(self.height)}" role="img" '
            f'aria-labelledby="{name}-title {name}-text" font-size="{FONT:g}">'
            f'<title id="{name}-title">{escape(self.title)}</title>'
            f'<desc id="{name}-text">{escape(self.description)}</desc>'
        )
        return head + "".join(self._parts) + "</svg>"


def text_width(words: str) -> float:
    """Estimate the width of a line of text."""
    return _LETTER * FONT * len(words)


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
