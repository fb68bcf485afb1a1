"""Reliability diagrams: the confidence of predictions against their accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.plot import plotted
from bayeslim.app.report.quantities import MISSING, number, percent
from bayeslim.app.report.scores import Scores
from bayeslim.app.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Plot

MARKERS = ("o", "s", "^", "D")
_MIN_PREDICTIONS_PER_BIN = 5
"""Bins with fewer predictions than this are noise, and are left out of the picture (not of the table)."""


def draw_reliability(scores: Mapping[str, Scores]) -> Figure:
    """Draw reliability curves side by side, the first of them strongest."""
    is_fraction = next(iter(scores.values())).is_fraction
    title = "Reliability"
    gaps = "; ".join(f"{name} {percent(found.ece, 2)}" for name, found in scores.items())
    what = "confidence" if is_fraction else "interval"
    caption = (
        f"How often predictions of each {what} are right; the gap in the legend is the mean distance from the "
        "diagonal (expected calibration error)."
    )
    if is_fraction:
        caption += f" Bins with fewer than {_MIN_PREDICTIONS_PER_BIN} predictions are in the table only."
    picture = plotted(
        title,
        f"Mean gap between confidence and accuracy: {gaps}.",
        4.6,
        lambda plot: _draw(plot, scores, is_fraction),
    )
    return Figure(title, caption, picture, _table(scores, is_fraction))


def _draw(plot: Plot, scores: Mapping[str, Scores], is_fraction: bool) -> None:
    ax = plot.subplots()
    ax.plot([0, 100], [0, 100], color=LIGHT.quiet, linestyle=":", linewidth=1.2, label="perfect")
    least = _MIN_PREDICTIONS_PER_BIN if is_fraction else 1
    for place, (name, found) in enumerate(scores.items()):
        curve = found.calibration
        shown = curve.count >= least
        said, so = 100 * curve.confidence[shown], 100 * curve.accuracy[shown]
        ax.plot(
            said.tolist(), so.tolist(), color=f"C{place}", marker=MARKERS[place % len(MARKERS)], markersize=4,
            linewidth=2.2 if place == 0 else 1.4, label=f"{name} (gap {percent(found.ece)})", zorder=9 - place,
        )  # fmt: skip
    ax.set(xlim=(0, 101), ylim=(0, 101), aspect="equal")
    ax.set_xlabel("confidence, %" if is_fraction else "probability of the interval, %")
    ax.set_ylabel("share that is right, %" if is_fraction else "targets inside, %")
    ax.grid(linewidth=0.6)
    plot.legend(loc="outside upper center", ncols=2)


def _table(scores: Mapping[str, Scores], is_fraction: bool) -> Table:
    first = next(iter(scores.values())).calibration
    rows = []
    for k in range(len(first.count)):
        cells = []
        for found in scores.values():
            curve = found.calibration
            filled = int(curve.count[k]) > 0
            cells += [percent(float(curve.accuracy[k])) if filled else MISSING, number(int(curve.count[k]))]
        low, high = float(first.edges[k]), float(first.edges[k + 1])
        label = f"{low:.3g} to {high:.3g}" if is_fraction else percent(float(first.confidence[k]), 0)
        rows.append((label, *cells))
    said = "confidence" if is_fraction else "interval"
    right = "right" if is_fraction else "inside"
    headings = [said, *(f"{name}: {part}" for name in scores for part in (right, "count"))]
    return Table.of(headings, rows)
