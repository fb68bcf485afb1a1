"""Plots inside the page: matplotlib figures as SVG that takes its colours from the page's style sheet.

A figure is drawn once, in the light theme. Its colours are then replaced by the names of the page's variables, so that
one picture serves light and dark screens and print. Text stays text, which can be searched, copied and read aloud.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from html import escape
from io import StringIO
from typing import TYPE_CHECKING

from bayeslim.app.style import LIGHT, has_matplotlib, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Plot

WIDTH_INCHES = 5.2
VARIABLES = {
    LIGHT.ink: "ink",
    LIGHT.quiet: "quiet",
    LIGHT.rest: "rest",
    LIGHT.paper: "card",
    **{colour: f"s{place}" for place, colour in enumerate(LIGHT.colours)},
}
"""The page's variable of every colour that plots use."""
_numbers = itertools.count(1)


def plotted(title: str, description: str, height: float, draw: Callable[[Plot], None]) -> str:
    """Draw a plot as SVG; empty text without matplotlib.

    Screen readers speak the title and the description. `draw` fills an empty figure of this height in inches.
    """
    if not has_matplotlib():
        return ""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Plot

    with styled(LIGHT), rc_context({"svg.fonttype": "none", "font.size": 9, "legend.fontsize": 8}):
        plot = Plot(figsize=(WIDTH_INCHES, height), layout="constrained")
        draw(plot)
        text = StringIO()
        plot.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return inlined(text.getvalue(), title, description)


def inlined(svg: str, title: str, description: str) -> str:
    """Turn a file of SVG into an element of a page.

    Names are made unique within the page, colours become variables, and a title and a description are added.
    """
    name = f"plot-{next(_numbers)}"
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    size = re.search(r'viewBox="([^"]*)"', body)
    assert size is not None
    body = body[body.index(">") + 1 :]
    body = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", body).replace("xlink:href", "href")
    for colour, variable in VARIABLES.items():
        body = re.sub(colour, f"var(--{variable})", body, flags=re.IGNORECASE)
    head = (
        f'<svg viewBox="{size[1]}" role="img" aria-labelledby="{name}-title {name}-text">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-text">{escape(description)}</desc>'
    )
    return head + body.strip()


def bars(title: str, description: str, rows: Sequence[tuple[str, float, str]], label: str) -> str:
    """Draw horizontal bars of per cent from the top: name, value and words of each."""

    def draw(plot: Plot) -> None:
        ax, places = plot.subplots(), range(len(rows))
        names, values, words = zip(*rows, strict=True)
        ax.barh(places, [100] * len(rows), color=LIGHT.rest, height=0.6)
        ax.barh(places, values, color="C0", height=0.6)
        ax.set_yticks(places, names)
        right = ax.secondary_yaxis("right")
        right.set_yticks(places, words)
        for axis in (ax, right):
            axis.tick_params(axis="y", length=0, labelsize=8)
        for side in (ax.spines["left"], right.spines["right"]):
            side.set_visible(False)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlim(0, max(100.0, *values))
        ax.set_xlabel(label)

    return plotted(title, description, 0.6 + 0.26 * len(rows), draw)
