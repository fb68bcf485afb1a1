"""The plot of the benchmark suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import growth
import matplotlib
from writers.suite import TITLES, growth_parts

matplotlib.use("agg")
from matplotlib import pyplot as plt

COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""The colour-blind safe palette of Okabe and Ito."""


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios of steps, and the growth curves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = found["parts"]
    steps = [network for network in TITLES if f"{network} steps" in parts]
    curves = growth_parts(parts)
    figure = plt.figure(figsize=(11, 7), layout="constrained")
    areas = figure.subfigures(1, 2, width_ratios=(1, 1))
    left = areas[0].subplots()
    names = [name for network in steps[:1] for name, row in parts[f"{network} steps"].items() if "ratio" in row]
    for place, network in enumerate(steps):
        rows = parts[f"{network} steps"]
        there = [name for name in names if "ratio" in rows.get(name, {})]
        heights = [names.index(name) + 0.2 * place for name in there]
        middles = [rows[name]["ratio"] for name in there]
        spread = [
            [rows[n]["ratio"] - rows[n]["ratio_low"] for n in there],
            [rows[n]["ratio_high"] - rows[n]["ratio"] for n in there],
        ]
        colour = COLOURS[1 + place]
        left.errorbar(middles, heights, xerr=spread, fmt="o", markersize=4, color=colour, label=TITLES[network])
    left.set_yticks(range(len(names)), names, fontsize=7)
    left.invert_yaxis()
    left.set(xlabel="a training step / that of the plain network", xscale="log")
    if steps:
        left.legend(fontsize=7)
    for area, (axis, part) in zip(areas[1].subplots(2, 2).flat, curves.items(), strict=False):
        for colour, (name, curve) in zip(COLOURS, part["curves"].items(), strict=False):
            label = f"{name}, p = {curve['exponent']:.2f}"
            area.plot(part["sizes"], curve["ms"], marker="o", markersize=3, color=colour, label=label)
        area.set(xscale="log", yscale="log", ylabel="ms")
        area.set_xlabel(growth.TITLES[axis], fontsize=8)
        area.set_xticks(part["sizes"], [str(size) for size in part["sizes"]], fontsize=7)
        area.minorticks_off()
        area.legend(fontsize=6, framealpha=0.5)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
