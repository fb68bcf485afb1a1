"""The Markdown table and the plot of the benchmark suite, from its results file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import growth
import matplotlib
from contenders import PEERS, PLAIN
from environment import ROOT

matplotlib.use("agg")
from matplotlib import pyplot as plt

DOCUMENT = ROOT / "docs" / "results.md"
TITLES = {"mlp": "MLP", "lenet5": "LeNet-5"}
PARTS = {"steps": "step", "fits": "fit", "predictions": "prediction", "memory": "memory"}
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""The colour-blind safe palette of Okabe and Ito."""


def write(results: Path, document: Path | None = None) -> None:
    """Write the table into a document, between its marks, and the plot beside it.

    Args:
        results: the results file; its name is that of the marks and of the plot.
        document: the Markdown file; docs/results.md if not given.
    """
    document = DOCUMENT if document is None else document
    found = json.loads(results.read_text(encoding="utf-8"))
    name = results.stem
    picture = document.parent / "pictures" / f"{name}.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    plot(found, picture)
    opening, closing = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    text = document.read_text(encoding="utf-8") if document.exists() else f"{opening}{closing}\n"
    before, there, rest = text.partition(opening)
    if not there:
        raise SystemExit(f"{document} has no line {opening.strip()!r} to write the table after.")
    after = rest.partition(closing)[2]
    image = f"![Ratios of steps to the plain network, and growth curves.](pictures/{picture.name})"
    document.write_text(f"{before}{opening}\n{table(found)}\n{image}\n\n{closing}{after}", encoding="utf-8")


def cell(row: Mapping[str, Any] | None) -> str:
    """Write a ratio with its quartiles."""
    if row is None:
        return ""
    if "failed" in row:
        return "failed"
    low, high = number(row["ratio_low"]), number(row["ratio_high"])
    return number(row["ratio"]) if low == high else f"{number(row['ratio'])} ({low} to {high})"


def number(value: float) -> str:
    """Write a ratio with about three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(found: Mapping[str, Any]) -> str:
    """Write one table of all contenders, growth exponents, and the reasons of failures."""
    parts, facts = found["parts"], found["environment"]
    columns = [
        (f"{TITLES[network]}, {word}", parts[f"{network} {part}"])
        for network in TITLES
        for part, word in PARTS.items()
        if f"{network} {part}" in parts
    ]
    names = list(dict.fromkeys(name for _, rows in columns for name in rows if name != PLAIN))
    names.sort(key=lambda name: name in PEERS)
    where = facts.get("gpu") if "cuda" in found["command"] else f"{facts['threads']} cores of a {facts['processor']}"
    rows = [["", *(title for title, _ in columns)]]
    rows += [[name, *(cell(cells.get(name)) for _, cells in columns)] for name in names]
    lines = [f"On {where}, as ratios to the plain network, with quartiles over rounds:", "", *markdown(rows)]
    exponents = [["", "sizes", *dict.fromkeys(name for part in _growth(parts).values() for name in part["curves"])]]
    for axis, part in _growth(parts).items():
        cells = [part["curves"].get(name) for name in exponents[0][2:]]
        shown = [
            "" if c is None else f"{c['exponent']:.2f} ({c['exponent_low']:.2f} to {c['exponent_high']:.2f})"
            for c in cells
        ]
        exponents.append([growth.TITLES[axis], f"{part['sizes'][0]} to {part['sizes'][-1]}", *shown])
    if len(exponents) > 1:
        lines += ["Exponents p of time ~ sizeᵖ, from the largest sizes:", "", *markdown(exponents)]
    failed = {name: rows["failed"] for _, cells in columns for name, rows in cells.items() if "failed" in rows}
    lines += [f"{name} failed: {reason}" for name, reason in failed.items()] + ([""] if failed else [])
    return "\n".join(lines)


def markdown(rows: list[list[str]]) -> list[str]:
    """Write rows as a table, the headings first."""
    headings, *others = rows
    return [f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *others)] + [""]


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios of steps, and the growth curves."""
    parts = found["parts"]
    steps = [network for network in TITLES if f"{network} steps" in parts]
    curves = _growth(parts)
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


def _growth(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {axis: parts[f"growth {axis}"] for axis in growth.SIZES if f"growth {axis}" in parts}
