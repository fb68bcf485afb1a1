"""One look for all plots: a palette that colour-blind readers can tell apart, in a light and a dark theme.

The colours are those of Okabe & Ito (2008). A place in the palette has one meaning in both themes: the first is blue on
white and sky blue on black, and so on. Figures are transparent, so that they stand on the page's own background.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from bayeslim.errors import MissingExtra


@dataclass(frozen=True)
class Theme:
    """The colours of one rendering of a plot.

    Attributes:
        name: "light" or "dark".
        ink: of text and of data that stand for the truth.
        quiet: of axes and of lines that guide the eye.
        rest: of areas in the background, such as the weights that were cut.
        paper: of the page, where a plot cannot be transparent.
        colours: of lines and areas, in order.
    """

    name: str
    ink: str
    quiet: str
    rest: str
    paper: str
    colours: tuple[str, ...]


LIGHT = Theme(
    "light", "#1d2329", "#5c6670", "#d3d9de", "#ffffff",
    ("#0072b2", "#d55e00", "#009e73", "#b0558a", "#a87400", "#3a9bd6"),
)  # fmt: skip
DARK = Theme(
    "dark", "#e4e8eb", "#9aa5ae", "#3a434b", "#14181e",
    ("#56b4e9", "#e8712a", "#2bb88f", "#d68fb8", "#e69f00", "#f0e442"),
)  # fmt: skip
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}


def has_matplotlib() -> bool:
    """Check whether plots can be drawn."""
    return find_spec("matplotlib") is not None


def require_matplotlib(needed_by: str) -> None:
    """Raise an error that names the extra unless matplotlib is installed."""
    if not has_matplotlib():
        raise MissingExtra("matplotlib", "plots", needed_by)


@contextmanager
def styled(theme: Theme) -> Iterator[None]:
    """Draw and save the figures made inside in a theme, whatever the user's settings."""
    import matplotlib.style
    from cycler import cycler

    settings = {
        "axes.axisbelow": True,
        "axes.edgecolor": theme.quiet,
        "axes.facecolor": "none",
        "axes.labelcolor": theme.ink,
        "axes.prop_cycle": cycler(color=theme.colours),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": theme.ink,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "figure.facecolor": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "grid.color": theme.rest,
        "hatch.color": theme.quiet,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
        "patch.edgecolor": theme.ink,
        "savefig.facecolor": "none",
        "svg.hashsalt": "bayeslim",
        "text.color": theme.ink,
        "xtick.color": theme.quiet,
        "xtick.labelcolor": theme.ink,
        "ytick.color": theme.quiet,
        "ytick.labelcolor": theme.ink,
    }
    with matplotlib.style.context(["default", settings]):
        yield
