"""Tables of `language_models.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

RULES = {
    "magnitude": "magnitude",
    "wanda": "Wanda",
    "sparsegpt": "SparseGPT",
    "row": "exact row-wise solve",
    "blocks x1": "bayeslim, block by block, one step",
    "blocks x4": "bayeslim, block by block, four steps",
    "blocks x16": "bayeslim, block by block, 16 steps",
    "bayeslim x1": "bayeslim, whole network, one step",
    "bayeslim x4": "bayeslim, whole network, four steps",
    "bayeslim x1 layer": 'bayeslim, whole network, one step, `scope="layer"`',
    "bayeslim x4 layer": 'bayeslim, whole network, four steps, `scope="layer"`',
}
TARGETS = ("50 %", "60 %", "70 %", "2:4", "units 20 %", "units 30 %")
TITLES = {"smollm2": "SmolLM2-135M", "byte-gpt": "byte-level GPT of 10.9 M"}
REFERENCE = "sparsegpt"


def cells(model: Mapping[str, Any], rule: str, target: str) -> dict[str, dict[str, Any]]:
    """Collect the finished cells of a rule and a target, by seed."""
    found = {}
    for key, cell in model["cells"].items():
        its_rule, its_target, seed = key.split(" | ")
        if (its_rule, its_target) == (rule, target) and "log_perplexity" in cell:
            found[seed] = cell
    return found


def damage_ratio(model: Mapping[str, Any], rule: str, target: str) -> float | None:
    """Average the increase of log-perplexity over SparseGPT's, of seeds that both have."""
    dense = model["dense_log_perplexity"]
    own, reference = cells(model, rule, target), cells(model, REFERENCE, target)
    ratios = [
        (cell["log_perplexity"] - dense) / (reference[seed]["log_perplexity"] - dense)
        for seed, cell in own.items()
        if seed in reference
    ]
    return statistics.mean(ratios) if ratios else None


def shown(model: Mapping[str, Any], rule: str, target: str) -> str:
    """Write a cell: the perplexity's mean and spread over seeds, and its damage relative to SparseGPT's."""
    found = [math.exp(cell["log_perplexity"]) for cell in cells(model, rule, target).values()]
    if not found:
        return ""
    digits = 1 if min(found) >= 10 else 3
    text = number(statistics.mean(found), digits)
    if max(found) > min(found):  # magnitude does not depend on the seed
        text += f" ± {number(statistics.stdev(found), digits)}"
    ratio = damage_ratio(model, rule, target)
    return text if ratio is None or rule == REFERENCE else f"{text} ({number(ratio, 2)})"


def number(value: float, digits: int) -> str:
    """Write a number; large ones without decimals, very large ones by their exponent."""
    if value >= 1e5:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.0f}" if value >= 100 else f"{value:.{digits}f}"


def seconds_and_memory(model: Mapping[str, Any], rule: str, names: list[str]) -> tuple[str, str]:
    """Write the range over targets of a rule's seconds and peak memory in GB."""
    texts = []
    for key, digits in (("seconds", 1), ("peak_gb", 1)):
        means = [
            statistics.mean(values)
            for name in names
            if (values := [cell[key] for cell in cells(model, rule, name).values() if key in cell])
        ]
        low, high = (number(bound(means), digits) for bound in (min, max)) if means else ("", "")
        texts.append(low if low == high else f"{low} to {high}")
    return texts[0], texts[1]


def rows(model: Mapping[str, Any]) -> list[list[str]]:
    """List the cells of a model's table, row after row, the headings first."""
    names = [t for t in TARGETS if any(cells(model, rule, t) for rule in RULES)]
    found = [["", *names, "seconds", "memory, GB"]]
    for rule, words in RULES.items():
        row = [shown(model, rule, target) for target in names]
        if any(row):
            found.append([words, *row, *seconds_and_memory(model, rule, names)])
    return found


def markdown(results: Mapping[str, Any]) -> str:
    """Write one table a model: rules in rows, targets in columns."""
    parts = []
    for name, title in TITLES.items():
        model = results.get("models", {}).get(name)
        if not model or not model["cells"]:
            continue
        seeds = max(len(cells(model, rule, t)) for rule in RULES for t in TARGETS)
        told = f"{seeds} calibration seeds" if seeds > 1 else "one calibration seed"
        parts.append(f"{title}, dense perplexity {math.exp(model['dense_log_perplexity']):.3f}, {told}:\n")
        headings, *others = rows(model)
        table = [headings, ["---"] * len(headings), *others]
        parts += [f"| {' | '.join(row)} |" for row in table]
        parts += ["", *([model["note"], ""] if "note" in model else [])]
    return "\n".join(parts)


COLUMNS = {
    "magnitude": ("magnitude",),
    "Wanda": ("wanda",),
    "SparseGPT": ("sparsegpt",),
    "bayeslim, block by block": ("blocks x16", "blocks x1"),
    "bayeslim, whole network": ("bayeslim x4", "bayeslim x1"),
}
"""Columns of the short table: of several rules, the first that was measured."""


def summary(results: Mapping[str, Any]) -> str:
    """Write one short table of both models: perplexities by target in rows, rules in columns.

    Targets that no cut of ours was measured at are left out, and so are units, which only magnitude cuts as well.
    """
    head = ["perplexity without retraining", "dense", *COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, title in TITLES.items():
        model = results.get("models", {}).get(name)
        for target in (name for name in TARGETS if "units" not in name) if model else ():
            row = [
                next((text for rule in rules if (text := shown(model, rule, target).partition(" (")[0])), "")
                for rules in COLUMNS.values()
            ]
            if any(text for text, words in zip(row, COLUMNS, strict=True) if words.startswith("bayeslim")):
                best = row.index(min((text for text in row if text), key=leading))
                row[best] = f"**{row[best]}**"
                dense = math.exp(model["dense_log_perplexity"])
                lines.append(f"| {title}, {target} | {number(dense, 1 if dense >= 10 else 3)} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def leading(text: str) -> float:
    """Read the number that a cell begins with."""
    return float(text.split()[0].replace(",", ""))
