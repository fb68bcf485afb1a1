"""The page of benchmarks: tables and plots from `benchmarks/results/*.json`, with no number typed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import language_model_table  # noqa: E402

RESULTS = BENCHMARKS / "results"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""The colour-blind safe palette of Okabe and Ito."""


def write(folder: Path) -> str:
    """Draw the plots into a folder, and return the page as reStructuredText."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [
        "Benchmarks",
        "==========",
        "",
        "These tables and plots are made from the files in ``benchmarks/results/`` when the site is built.",
        "",
        *_one_shot(folder),
        *_language_models(),
        *_out_of_distribution(folder),
        *_variational_pruning(folder),
        *_continual(),
        *_training_steps(),
    ]
    return "\n".join(parts) + "\n"


def _one_shot(folder: Path) -> list[str]:
    found = _read("one_shot_pruning")
    lines = _heading("Pruning without retraining", found)
    lines += ["Test error on MNIST in per cent, by the fraction of weights cut; mean over seeds.", ""]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for area, (network, rules) in zip(axes, found["summary"].items(), strict=True):
        curves = {rule: points for rule, points in rules.items() if rule != "dense"}
        for colour, (rule, points) in zip(COLOURS, curves.items(), strict=False):
            area.plot(list(points), [point["mean"] for point in points.values()], marker="o", color=colour, label=rule)
        area.axhline(rules["dense"]["0"]["mean"], color="grey", linewidth=1)
        area.set(title=network, xlabel="fraction cut", yscale="log")
        sparsities = list(next(iter(curves.values())))
        rows = [(rule, *(f"{points[s]['mean']:.2f}" for s in sparsities)) for rule, points in curves.items()]
        lines += [f"{network}, dense {rules['dense']['0']['mean']:.2f}:", ""]
        lines += _table(("rule", *sparsities), rows)
    axes[0].set_ylabel("test error, %")
    axes[0].legend(fontsize=7)
    return lines + _picture(figure, folder / "one_shot_pruning.svg", "Test error against the fraction of weights cut.")


def _language_models() -> list[str]:
    found = _read("language_models")
    lines = _heading("Language models cut without retraining", found)
    lines += ["Perplexity; in brackets, the increase of its logarithm relative to SparseGPT's.", ""]
    for name, title in language_model_table.TITLES.items():
        if name in found["models"]:
            headings, *rows = language_model_table.rows(found["models"][name])
            dense = math.exp(found["models"][name]["dense_log_perplexity"])
            lines += [f"{title}, dense {dense:.3f}:", "", *_table(headings, rows)]
    return lines


def _out_of_distribution(folder: Path) -> list[str]:
    found = _read("out_of_distribution")
    sets = [name for name in next(iter(found["table"].values())) if name not in ("error", "nll", "ece")]
    lines = _heading("Telling other images from digits", found)
    lines += ["AUROC of the predictive entropy in per cent, MNIST against other sets; mean over seeds.", ""]
    rows = [
        (name, f"{row['error']['mean']:.2f}", *(f"{row[s]['mean']:.1f}" for s in sets))
        for name, row in found["table"].items()
    ]
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    width = 0.8 / len(sets)
    for place, (colour, name) in enumerate(zip(COLOURS, sets, strict=False)):
        heights = [row[name]["mean"] for row in found["table"].values()]
        axes.bar([k + place * width for k in range(len(heights))], heights, width, color=colour, label=name)
    axes.set_xticks([k + 0.4 - width / 2 for k in range(len(rows))], list(found["table"]), rotation=20)
    axes.set(ylabel="AUROC, %", ylim=(50, 100))
    axes.legend(fontsize=7, loc="lower right")
    lines += _table(("posterior", "error", *sets), rows)
    return lines + _picture(figure, folder / "out_of_distribution.svg", "AUROC by posterior and data set.")


def _variational_pruning(folder: Path) -> list[str]:
    found = _read("variational_pruning")
    lines = _heading("Pruning a variational network by signal to noise", found)
    lines += ["Test error on MNIST in per cent by the fraction of weights cut, without retraining.", ""]
    rows, sparsities = [], []
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    curves = {(prior, rule): points for prior, rules in found["test_error"].items() for rule, points in rules.items()}
    for colour, ((prior, rule), points) in zip(COLOURS, curves.items(), strict=False):
        sparsities = list(points)
        rows.append((f"{prior} prior, {rule}", *(f"{value:.2f}" for value in points.values())))
        axes.plot(sparsities, list(points.values()), marker="o", color=colour, label=f"{prior}, {rule}")
    axes.set(xlabel="fraction cut", ylabel="test error, %")
    axes.legend(fontsize=7)
    lines += _table(("", *sparsities), rows)
    return lines + _picture(figure, folder / "variational_pruning.svg", "Test error against the fraction cut.")


def _continual() -> list[str]:
    found = _read("continual")
    lines = _heading("Learning task after task", found)
    rows = [
        (kind, rule, str(result["tasks"]), ", ".join(f"{value:.1f}" for value in result["accuracies_percent"]))
        for kind, rules in found["summary"].items()
        for rule, result in rules.items()
    ]
    return lines + _table(("tasks of MNIST", "rule", "number of tasks", "mean accuracy, %"), rows)


def _training_steps() -> list[str]:
    found = _read("training_steps") | {"command": "python benchmarks/training_graphs.py steps"}
    lines = _heading("Training steps on a GPU", found)
    lines += [
        f"On one {found['environment']['gpu']}, as a ratio to the eager step of the plain network, by estimator.",
        "",
    ]
    ways = [way for way in next(iter(found["results"].values())) if way != "plain"]
    rows = [
        (case, *(f"{table[way]['ratio']:.2f}" if "ratio" in table[way] else "failed" for way in ways))
        for case, table in found["results"].items()
    ]
    return lines + _table(("network", *ways), rows)


def _read(name: str) -> dict[str, Any]:
    return {"name": name, **json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))}


def _heading(title: str, found: Mapping[str, Any]) -> list[str]:
    command = found.get("command", f"python benchmarks/{found['name']}.py")
    commit = str(found["environment"].get("commit") or "")[:9]
    source = f"``{command}``" + (f", commit ``{commit}``" if commit else "")
    doubt = ["", f".. warning:: {found['provenance']}"] if "provenance" in found else []
    return [title, "-" * len(title), "", source, *doubt, ""]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in (headings, *rows):
        lines += [f"   {'* -' if not place else '  -'} {cell}" for place, cell in enumerate(row)]
    return [*lines, ""]


def _picture(figure: Any, path: Path, words: str) -> list[str]:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return [f".. image:: {path.parent.name}/{path.name}", f"   :alt: {words}", ""]
