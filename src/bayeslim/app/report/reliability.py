"""Reliability diagrams: the confidence of predictions against their accuracy."""

from __future__ import annotations

from collections.abc import Mapping

from bayeslim.app.report.axes import Frame, Scale
from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.quantities import MISSING, number, percent
from bayeslim.app.report.scores import Scores
from bayeslim.app.report.svg import Drawing

_MIN_PREDICTIONS_PER_BIN = 5
"""Bins with fewer predictions than this are noise, and are left out of the picture (not of the table)."""


def draw_reliability(scores: Mapping[str, Scores]) -> Figure:
    """Draw reliability curves side by side.

    Args:
        scores: of predictions by name; the first is drawn strongest.
    """
    is_fraction = next(iter(scores.values())).is_fraction
    title = "Reliability"
    gaps = "; ".join(f"{name} {percent(found.ece, 2)}" for name, found in scores.items())
    drawing = Drawing(460, 430, title, f"Mean gap between confidence and accuracy: {gaps}.")
    styles = {name: "s0 strong" if k == 0 else f"s{k}" for k, name in enumerate(scores)}
    entries = [(f"curve {style}", f"{name} ({percent(scores[name].ece)})") for name, style in styles.items()]
    top = drawing.legend([("curve ideal", "perfect"), *entries], (58, 0), 390) + 8
    ticks = [(t, percent(t, 0)) for t in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    frame = Frame(drawing, Scale(0, 1, 58, 446), Scale(0, 1, 384, top))
    frame.y_axis(ticks, "share that is right" if is_fraction else "targets inside")
    frame.x_axis(ticks, "confidence" if is_fraction else "probability of the interval")
    frame.curve([(0, 0), (1, 1)], "ideal")
    for name, style in reversed(styles.items()):
        curve = scores[name].calibration
        rows = zip(curve.confidence.tolist(), curve.accuracy.tolist(), curve.count.tolist(), strict=True)
        frame.curve([(said, so) for said, so, count in rows if count >= _MIN_PREDICTIONS_PER_BIN], style, dots=True)
    what = "confidence" if is_fraction else "interval"
    caption = (
        f"How often predictions of each {what} are right; the number in the legend is the mean gap to the diagonal "
        "(expected calibration error)."
    )
    if is_fraction:
        caption += f" Bins with fewer than {_MIN_PREDICTIONS_PER_BIN} predictions are in the table only."
    return Figure(title, caption, drawing.render(), _table(scores, is_fraction))


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
