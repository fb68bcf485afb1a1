"""Tables of the grid of Bayes by Backprop.

Settings are compared by their validation error; the test error stands beside it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bayes_by_backprop_grid import GRID, stacks

from writers.markdown import table

TITLES = {
    "samples": "samples",
    "pi": "π",
    "minus_log_sigma1": "−log σ₁",
    "minus_log_sigma2": "−log σ₂",
    "lr": "learning rate",
}
BEST_ROWS = 5

Row = Mapping[str, Any]


def error(row: Row, part: str = "validation", how: str = "sample") -> float:
    """Read an error in per cent."""
    return float(row[part][how]["error"])


def means(rows: Sequence[Row], name: str) -> dict[float, float]:
    """Average the validation error over all settings with a value of a hyperparameter."""
    return {
        value: statistics.mean(error(row) for row in rows if row[name] == value)
        for value in GRID[name]
        if any(row[name] == value for row in rows)
    }


def paired_effects(rows: Sequence[Row], name: str) -> list[float]:
    """List, for every setting of the others, the range of the validation error over a hyperparameter."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[other] for other in GRID if other != name), []).append(error(row))
    return [max(group) - min(group) for group in groups.values() if len(group) > 1]


def shown(name: str, value: float) -> str:
    """Write a value of a hyperparameter."""
    if name == "pi":
        return {0.25: "1/4", 0.5: "1/2", 0.75: "3/4"}[value]
    return f"{value:.0e}".replace("e-0", "e-") if name == "lr" else f"{value:g}"


def markdown(results: Mapping[str, Any]) -> str:
    """Write the effect of every hyperparameter, the best settings, and the time."""
    rows: list[Row] = [row for stack in results["stacks"].values() for row in stack["rows"]]
    seconds = sum(stack["seconds"] for stack in results["stacks"].values())
    machines = " and ".join(sorted({stack["on"] for stack in results["stacks"].values()}))
    settings = results["settings"]
    lines = [
        f"{len(rows)} networks, {settings['epochs']} epochs each, trained in {seconds / 60:.0f} minutes on one "
        f"{machines}, compilation included. Each cell is the validation error in per cent of the average of "
        f"{settings['draws']} draws.",
        "",
    ]
    if missing := [name for name in stacks() if name not in results["stacks"]]:
        lines += [f"The run ended before these settings were trained: {'; '.join(missing)}.", ""]
    effects = [["", "values", "mean over all other settings", "best setting", "range in pairs, median"]]
    for name, title in TITLES.items():
        by_value, pairs = means(rows, name), paired_effects(rows, name)
        best = {value: min(error(row) for row in rows if row[name] == value) for value in by_value}
        effects.append(
            [
                title,
                " / ".join(shown(name, value) for value in by_value),
                " / ".join(f"{value:.2f}" for value in by_value.values()),
                " / ".join(f"{value:.2f}" for value in best.values()),
                f"{statistics.median(pairs):.2f}" if pairs else "",
            ]
        )
    lines += [*table(effects[0], effects[1:]).splitlines(), ""]
    lines += ["The best settings by validation error:", ""]
    chosen = [[*TITLES.values(), "validation", "test", "test, mean network", "test NLL"]]
    chosen += [
        [
            *(shown(name, row[name]) for name in TITLES),
            f"{error(row):.2f}",
            f"{error(row, 'test'):.2f}",
            f"{error(row, 'test', 'mean'):.2f}",
            f"{row['test']['sample']['nll']:.3f}",
        ]
        for row in sorted(rows, key=error)[:BEST_ROWS]
    ]
    return "\n".join([*lines, *table(chosen[0], chosen[1:]).splitlines(), "", *findings(rows)])


def findings(rows: Sequence[Row]) -> list[str]:
    """Say in words which hyperparameters matter, and what the best one of each kind is."""
    effects = {name: statistics.median(pairs) for name in TITLES if (pairs := paired_effects(rows, name))}
    order = sorted(effects, key=effects.__getitem__, reverse=True)
    ranked = ", then ".join(f"{TITLES[name]} ({effects[name]:.2f} points)" for name in order)
    quickest = max(GRID["lr"])
    at_best = [row for row in rows if row["lr"] == quickest]
    errors = sorted(error(row, "test") for row in at_best)
    noise = 100 * math.sqrt(errors[len(errors) // 2] / 100 * (1 - errors[len(errors) // 2] / 100) / 10_000)
    return [
        f"By the median range in pairs that differ in one hyperparameter alone: {ranked}. At the learning rate "
        f"{shown('lr', quickest)} all {len(at_best)} settings lie between {errors[0]:.2f} and {errors[-1]:.2f} % test "
        f"error, with a median of {errors[len(errors) // 2]:.2f} %; the standard error of one measurement is "
        f"{noise:.2f} points.",
        "",
    ]
