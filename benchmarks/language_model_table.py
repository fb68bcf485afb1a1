"""The table of `language_models.py`, as Markdown, from its results."""

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
    "bayeslim x1": "bayeslim, one step",
    "bayeslim x4": "bayeslim, four steps",
    "bayeslim x1 layer": 'bayeslim, one step, `scope="layer"`',
    "bayeslim x4 layer": 'bayeslim, four steps, `scope="layer"`',
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
    if len(found) > 1:
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


def markdown(results: Mapping[str, Any]) -> str:
    """Write one table a model: rules in rows, targets in columns."""
    parts = []
    for name, title in TITLES.items():
        model = results.get("models", {}).get(name)
        if not model or not model["cells"]:
            continue
        names = [t for t in TARGETS if any(cells(model, rule, t) for rule in RULES)]
        seeds = max(len(cells(model, rule, t)) for rule in RULES for t in names)
        told = f"{seeds} calibration seeds" if seeds > 1 else "one calibration seed"
        parts.append(f"{title}, dense perplexity {math.exp(model['dense_log_perplexity']):.3f}, {told}:\n")
        parts.append(f"| | {' | '.join(names)} | seconds | memory, GB |")
        parts.append("|---" * (len(names) + 3) + "|")
        for rule, words in RULES.items():
            row = [shown(model, rule, target) for target in names]
            if any(row):
                parts.append(f"| {words} | {' | '.join((*row, *seconds_and_memory(model, rule, names)))} |")
        parts.append("")
    return "\n".join(parts)
