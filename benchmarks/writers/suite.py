"""The table of the benchmark suite: the cost of every method and every peer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import growth
from contenders import PEERS, PLAIN

from writers.markdown import table as as_table

TITLES = {"mlp": "MLP", "lenet5": "LeNet-5"}
PARTS = {"steps": "step", "fits": "fit", "predictions": "prediction", "memory": "memory"}


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


def markdown(found: Mapping[str, Any], name: str) -> str:
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
    where = facts.get("gpu") if "cuda" in found["command"] else f"{facts['threads']} cores of an {facts['processor']}"
    rows = [["", *(title for title, _ in columns)]]
    rows += [[name, *(cell(cells.get(name)) for _, cells in columns)] for name in names]
    if "seconds" in found:
        where += f", in {sum(found['seconds'].values()) / 60:.0f} minutes"
    lines = [f"On {where}, as ratios to the plain network, with quartiles over rounds:", ""]
    lines += [as_table(rows[0], rows[1:])]
    growing = growth_parts(parts)
    exponents = [["", "sizes", *dict.fromkeys(name for part in growing.values() for name in part["curves"])]]
    for axis, part in growing.items():
        cells = [part["curves"].get(name) for name in exponents[0][2:]]
        shown = [
            "" if c is None else f"{c['exponent']:.2f} ({c['exponent_low']:.2f} to {c['exponent_high']:.2f})"
            for c in cells
        ]
        exponents.append([growth.TITLES[axis], f"{part['sizes'][0]} to {part['sizes'][-1]}", *shown])
    if len(exponents) > 1:
        lines += ["Exponents p of time ~ sizeᵖ, from the largest sizes:", "", as_table(exponents[0], exponents[1:])]
    failed = {name: rows["failed"] for _, cells in columns for name, rows in cells.items() if "failed" in rows}
    lines += [f"{name} failed: {reason}" for name, reason in failed.items()] + ([""] if failed else [])
    lines += [f"![Ratios of steps to the plain network, and growth curves.](pictures/{name}.svg)"]
    return "\n".join(lines)


def growth_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """List the growth curves that were measured, by axis."""
    return {axis: parts[f"growth {axis}"] for axis in growth.SIZES if f"growth {axis}" in parts}
