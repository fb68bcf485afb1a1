"""Notes on a run: what the cut cost, where it did not save time and why, and whether the network was trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bayeslim.app.benchmark import Benchmark
from bayeslim.app.report.overview import DENSE, SLIM, Row
from bayeslim.app.report.quantities import duration, percent
from bayeslim.types import split_batch

FASTER = 1.2
"""A speed-up that counts as one."""
MUCH_WORSE = 0.05
"""An increase of the error, as a fraction of the answers, from which on a note warns."""
IN_WORDS = {"eager": "eager PyTorch", "compile": "compiled PyTorch"}
"""Names of runtimes in notes, where they differ from those in tables."""


def too_much(rows: Mapping[str, Row]) -> list[str]:
    """Write a note if the network lost much accuracy in the cut."""
    dense, slim = rows[DENSE].scores, rows[SLIM].scores
    if dense is None or slim is None or not slim.is_fraction or slim.error <= dense.error + MUCH_WORSE:
        return []
    return [
        f"Too much was cut: {slim.error_text} of the answers are wrong now, {dense.error_text} before. Ask for a "
        "smaller budget, or fine-tune; of a recipe, for less strength or more epochs."
    ]


def not_faster(timed: Benchmark) -> list[str]:
    """Write a note on the runtimes in which the slim network is not faster.

    The note says what was measured, the reason as far as the measurements show it, and the runtime that takes the least
    time.
    """
    batch = min(timed.batch_sizes)
    slow = [runtime for runtime in timed.runtimes if timed.speedup(runtime, batch).median < FASTER]
    if not slow:
        return []
    measured = ", ".join(f"{_in_words(runtime)} ({_times(timed, runtime)})" for runtime in slow)
    inputs = "one input" if batch == 1 else f"{batch} inputs"
    parts = [f"With {inputs} in a call, the slim network is not much faster than the dense one in {measured}."]
    reasons: dict[str, list[str]] = {}
    for runtime in slow:
        reasons.setdefault(_reason(timed, runtime), []).append(_in_words(runtime))
    for reason, runtimes in reasons.items():
        parts.append(reason if len(reasons) == 1 else f"In {' and '.join(runtimes)}: {reason[0].lower()}{reason[1:]}")
    return [" ".join([*parts, *_advice(timed, slow)])]


def _times(timed: Benchmark, runtime: str) -> str:
    batch = min(timed.batch_sizes)
    dense, slim = (duration(timed.latency(name, runtime, batch)) for name in ("dense", "slim"))
    return f"dense {dense}, slim {slim}"


def _reason(timed: Benchmark, runtime: str) -> str:
    """Explain why a cut saves no time in a runtime, if the measurements show it."""
    dense, slim = timed.sizes["dense"], timed.sizes["slim"]
    skips_zeros = runtime == "C"
    before, after = (dense.nonzeros, slim.nonzeros) if skips_zeros else (dense.flops, slim.flops)
    left = after / max(before, 1)
    batch, most = min(timed.batch_sizes), max(timed.batch_sizes)
    gain = timed.speedup(runtime, batch).median
    has_zeros = not skips_zeros and slim.nonzeros * FASTER <= slim.parameters
    zeros = percent(1 - slim.nonzeros / max(slim.parameters, 1))
    if left * FASTER > 1:
        if not has_zeros:
            return f"Little was cut: {percent(left)} of the {'weights' if skips_zeros else 'arithmetic'} is left."
        return (
            f"Its layers are about as large as before: {zeros} of its weights are single zeros, and dense "
            "kernels multiply with them as with other weights."
        )
    also = f" {zeros} of its weights are single zeros, which dense kernels do not skip." if has_zeros else ""
    work = f"Its {'non-zero weights' if skips_zeros else 'arithmetic'} fell to {percent(left)}"
    each = timed.latency("slim", runtime, most) / most
    alone = timed.latency("slim", runtime, batch) / batch
    overhead = 1 - (1 - 1 / gain) / (1 - left)  # the share of a dense call that did not shrink with the arithmetic
    if most > batch and overhead > 0.5 and each < alone / 2:
        return (
            f"{work}, but the network is so small that the overhead of a call takes most of the time: with {most} "
            f"inputs in a call, each takes less than half as long.{also}"
        )
    return f"{work}; the measurements do not show why the time did not.{also}"


def _advice(timed: Benchmark, slow: list[str]) -> list[str]:
    """Name the runtime of the least time, and what would help if the cut does not."""
    batch = min(timed.batch_sizes)
    slim = {runtime: timed.latency("slim", runtime, batch) for runtime in timed.runtimes}
    best = min(slim, key=lambda runtime: slim[runtime])
    found = []
    if any(slim[best] * FASTER <= slim[runtime] for runtime in slow):
        where = "the C library, which leaves zeros out" if best == "C" else _in_words(best)
        found.append(f"It takes the least time in {where}: {_times(timed, best)}.")
        if best not in slow:
            return found
    if timed.sizes["slim"].nonzeros * FASTER <= timed.sizes["slim"].parameters:
        found.append('Cut whole units (granularity="unit") for smaller layers.')
    if "C" not in timed.runtimes:
        why = timed.skipped.get("C", "it needs a C compiler.")
        found.append(f"C, which leaves zeros out, was not measured: {why}")
    return found


def _in_words(runtime: str) -> str:
    return IN_WORDS.get(runtime, runtime)


def untrained(rows: Mapping[str, Row], test: Iterable[Any]) -> list[str]:
    """Write a note if the network before the cut was no better than a constant answer.

    The data are read only for a network with errors.
    """
    dense = rows[DENSE].scores
    if dense is None or not dense.is_fraction or dense.error <= MUCH_WORSE:
        return []
    targets = torch.cat([split_batch(batch)[1].flatten() for batch in test]).long()
    _, counts = targets[targets >= 0].unique(return_counts=True)
    guessed = 1 - float(counts.max() / counts.sum()) if len(counts) > 1 else 1.0
    if dense.error < guessed:
        return []
    return [
        f"The network knew nothing before the cut: {dense.error_text} of its answers are wrong, against "
        f"{percent(guessed, 2)} for a constant answer. "
        'Load trained weights, or train it: fit={"epochs": 20}, or '
        "--epochs 20 on the command line."
    ]
