"""Tables of training steps and whole fits on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from writers.markdown import table

STEPS = {"eager": "eager", "captured": "CUDA graph", "compiled and captured": "compiled CUDA graph"}
STEP_AIMS = {
    "784-400-400-10, batch 128": {"shared": 0.23, "local": 0.30},
    "LeNet-5, batch 1024": {"shared": 0.65, "local": 1.2},
    "ResNet-18, batch 512": {"shared": 0.69, "local": 1.3},
}
"""The aims of a step, by the better of the two graphs."""

SECONDS_AIMED_AT = {"Bayes by Backprop, 400 units, 600 epochs": 90, "Sparse VD, LeNet-5, 100 epochs": 40}


def steps(found: Mapping[str, Any]) -> str:
    """Write steps as ratios to the plain network's eager step."""
    rows = []
    for case, ways in found["results"].items():
        for noise in ("shared", "local"):
            cells = [ways[f"{noise}, {way}"] for way in STEPS]
            aim, best = STEP_AIMS[case][noise], min(cell["ratio"] for cell in cells[1:] if "ratio" in cell)
            shown = [f"{cell['ratio']:.2f}" if "ratio" in cell else "failed" for cell in cells]
            rows.append([case, noise, *shown, f"{aim:g}: {'met' if best <= aim else '**missed**'}"])
    reasons = "".join(
        f"\n{case}, {way}, failed: {cell['failed']}.\n"
        for case, ways in found["results"].items()
        for way, cell in ways.items()
        if "failed" in cell
    )
    return table(["network", "noise", *STEPS.values(), "aim"], rows) + reasons


def fits(busy: Mapping[str, Any], alone: Mapping[str, Any]) -> str:
    """Write seconds and test errors of whole fits, alone and beside other work, with the aims."""
    rows = []
    for case, fit in alone["results"].items():
        aim = SECONDS_AIMED_AT[case]
        runs = [text for run in (fit, busy["results"][case]) for text in _run(run)]
        rows.append([case, *runs, f"{aim}: {'met' if fit['seconds'] <= aim else '**missed**'}"])
    return table(["fit", "seconds, alone", "error, %", "seconds, beside other work", "error, %", "aim, alone"], rows)


def _run(fit: Mapping[str, float]) -> tuple[str, str]:
    return f"{fit['seconds']:.1f}", f"{100 * fit['error']:.2f}"
