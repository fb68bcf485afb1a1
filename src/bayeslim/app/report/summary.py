"""The summary on top of the report: size, speed, error and what is uncertain, in sentences.

Of k errors among n examples the interval is Wilson's (1927): the error rates p that k does not contradict at 95 %,
|k/n − p| ≤ z √(p (1 − p) / n).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from bayeslim.app.benchmark import Benchmark
from bayeslim.app.report.overview import DENSE, SLIM, Row
from bayeslim.app.report.quantities import duration, number, percent, size, times
from bayeslim.app.report.scores import Scores
from bayeslim.results import Prediction

Statement = tuple[str, str]
"""A heading, and a few sentences."""
_Z_95 = 1.959964
_SHARE_ABSTAINED = 0.1


def wilson_interval(wrong: int, count: int) -> tuple[float, float]:
    """Compute the 95 % interval of an error rate from the errors among examples.

    >>> [round(end, 3) for end in wilson_interval(5, 100)]
    [0.022, 0.112]
    """
    share, square = wrong / count, _Z_95**2 / count
    centre = (share + square / 2) / (1 + square)
    reach = _Z_95 / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, centre - reach), min(1.0, centre + reach)


def fastest(timed: Benchmark) -> tuple[str, int]:
    """Find the fastest runtime of the slim network, at the smallest batch."""
    batch = min(timed.batch_sizes)
    return min(timed.runtimes, key=lambda runtime: timed.latency("slim", runtime, batch)), batch


def summarise(
    rows: Mapping[str, Row],
    timed: Benchmark | None,
    prediction: Prediction | None,
    targets: Tensor | None,
    ignored: int | None = None,
) -> list[Statement]:
    """Summarise a compression for readers who know nothing of networks.

    Targets of the class `ignored` are left out.
    """
    found = [_size(rows[DENSE], rows[SLIM]), _speed(rows[DENSE], rows[SLIM], timed), _error(rows)]
    found.append(_uncertain(rows, timed, prediction, targets, ignored))
    return [(heading, words) for heading, words in found if words]


def _size(dense: Row, slim: Row) -> Statement:
    if dense.cost is None or slim.cost is None:
        return "Size", ""
    left = percent(slim.cost.parameters / max(1, dense.cost.parameters))
    smaller = times(dense.cost.bytes / max(1, slim.cost.bytes))
    return "Size", (
        f"{number(slim.cost.parameters)} of {number(dense.cost.parameters)} parameters are left ({left}). Saved, the "
        f"network takes {size(slim.cost.bytes)} instead of {size(dense.cost.bytes)}: it is {smaller} smaller."
    )


def _speed(dense: Row, slim: Row, timed: Benchmark | None) -> Statement:
    if timed is not None:
        runtime, batch = fastest(timed)
        before, after = (timed.latency(name, runtime, batch) for name in ("dense", "slim"))
        where, inputs = f" in {runtime}", "One input" if batch == 1 else f"A batch of {batch} inputs"
    elif dense.seconds and slim.seconds:
        before, after, where, inputs = dense.seconds, slim.seconds, " in eager PyTorch", "One input"
    else:
        return "Speed", ""
    return "Speed", (
        f"{inputs} takes {duration(after)} instead of {duration(before)}{where}: {times(before / after)} as fast."
    )


def _error(rows: Mapping[str, Row]) -> Statement:
    dense, slim = rows[DENSE].scores, rows[SLIM].scores
    if dense is None or slim is None:
        return "Error", ""
    if slim.is_fraction:
        words = f"{slim.error_text} of {slim.count:,} held-out examples are wrong, {dense.error_text} before the cut."
    else:
        words = f"The root mean squared error is {slim.error_text}, {dense.error_text} before the cut."
    others = [
        f"{name} {row.scores.error_text}"
        for name, row in rows.items()
        if name not in (DENSE, SLIM) and row.scores is not None
    ]
    return "Error", words + (f" For comparison: {', '.join(others)}." if others else "")


def _uncertain(
    rows: Mapping[str, Row],
    timed: Benchmark | None,
    prediction: Prediction | None,
    targets: Tensor | None,
    ignored: int | None,
) -> Statement:
    words = []
    dense, slim = rows[DENSE].scores, rows[SLIM].scores
    if dense is not None and slim is not None and slim.is_fraction:
        words.append(_chance(dense, slim))
    if slim is not None:
        what = "Its probabilities are" if slim.is_fraction else "Its intervals cover the target with probabilities"
        words.append(f"{what} off by {percent(slim.ece)} on average.")
    if prediction is not None and targets is not None:
        words.append(_abstaining(prediction, targets, ignored))
    if timed is not None:
        spread = timed.speedup(*fastest(timed))
        words.append(f"In half of all rounds the speed-up was between {times(spread.low)} and {times(spread.high)}.")
    return "What is uncertain", " ".join(word for word in words if word)


def _chance(dense: Scores, slim: Scores) -> str:
    before, after = (wilson_interval(round(s.error * s.count), s.count) for s in (dense, slim))
    apart = after[0] > before[1] or before[0] > after[1]
    verdict = "is more than chance" if apart else "may be chance"
    return (
        f"With {slim.count:,} examples, the error is between {percent(after[0])} and {percent(after[1])} (95 % "
        f"interval; before the cut {percent(before[0])} to {percent(before[1])}): the difference {verdict}."
    )


def _abstaining(prediction: Prediction, targets: Tensor, ignored: int | None) -> str:
    """Say how many errors are among the least certain answers."""
    if prediction.kind != "classes" or prediction.mean.ndim != 2 or targets.ndim != 1:
        return ""
    order = prediction.entropy.cpu().argsort()
    answers, truths = prediction.classes.cpu()[order], targets.cpu()[order]
    wrong = answers != truths if ignored is None else (answers != truths)[truths != ignored]
    kept = len(wrong) - round(_SHARE_ABSTAINED * len(wrong))
    if not int(wrong.sum()) or not 0 < kept < len(wrong):
        return ""
    return (
        "The posterior says which answers to doubt: the least certain tenth of them holds "
        f"{int(wrong[kept:].sum())} of {int(wrong.sum())} errors, and of the others "
        f"{percent(float(wrong[:kept].float().mean()), 2)} are wrong."
    )
