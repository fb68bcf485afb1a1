"""The page of benchmarks: the generated tables of all documents, and plots, from `benchmarks/results/*.json`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import documents  # noqa: E402
from writers import pruning  # noqa: E402

from bayeslim.app.style import THEMES, styled  # noqa: E402

MARKERS = "osD^"

SECTIONS = {
    "pruning without retraining": "Test error on MNIST in per cent by the weights cut; mean of three seeds.",
    "residual pruning": "Test error on Fashion-MNIST in per cent, cut in ten steps.",
    "recurrent pruning": "Test error on the digits in per cent.",
    "prior widths": "Test error on the digits in per cent, 70 % of the weights cut.",
    "pruning by signal to noise": "Test error of a variational network on MNIST in per cent.",
    "training to be sparse": "Test error in per cent, by what is left of the network.",
    "recipes that cut": "Reduction, and test error in per cent; dense and magnitude in brackets.",
    "language models": "Perplexity; in brackets, the increase of its logarithm relative to SparseGPT's.",
    "out of distribution": "MNIST against other images.",
    "links of Laplace": "Total variation to the exact average, and NLL.",
    "many models": "Methods on MNIST, and a plain network distilled from each.",
    "grid of Bayes by Backprop": "The settings of the paper's search.",
    "choices of Bayes by Backprop": "One choice at a time, on MNIST.",
    "Rényi divergences": "UCI sets; published numbers in brackets.",
    "chain temperatures": "Variance of samplers over the exact one, at the usual and the chosen rate.",
    "continual learning": "Mean accuracy after the last task.",
    "training steps on a GPU": "Ratio to the eager step of the plain network.",
    "whole fits on a GPU": "Capture and compilation included.",
    "predictions from S networks": "Cost in passes of the plain network; a star marks a cost above its aim.",
}
"""The blocks that the page shows, and a line about each."""


def write(folder: Path) -> str:
    """Draw the plots into a folder, and return the page as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [
        "# Benchmarks\n",
        "The tables and plots on this page are written from the files in `benchmarks/results/` when the site is built. "
        "{doc}`Results <results>` explains the most important ones.\n",
    ]
    for name, about in SECTIONS.items():
        sources = documents.BLOCKS[name][1]
        parts += [f"## {name[0].upper()}{name[1:]}\n", f"{about} {' '.join(map(_source, sources))}\n"]
        parts += [documents.block(name)]
        if name in PLOTS:
            parts += [_picture(name, about, folder, theme) for theme in THEMES]
    return "\n".join(parts)


def _picture(name: str, about: str, folder: Path, theme: str) -> str:
    source = documents.BLOCKS[name][1][0]
    path = folder / f"{source}_{theme}.svg"
    with styled(THEMES[theme]):
        figure = PLOTS[name](documents.results()[source])
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return f"```{{image}} {folder.name}/{path.name}\n:class: only-{theme}\n:alt: {about}\n```\n"


def _source(name: str) -> str:
    found = documents.results()[name]
    command = str(found.get("command", f"python benchmarks/{name}.py"))
    command = re.sub(r"benchmarks/training_(\w+)\.py", r"benchmarks/training_graphs.py \1", command)
    commit = str(found.get("environment", {}).get("commit") or "")[:9]
    doubt = "".join(f" **{found[key]}**" for key in ("provenance", "outdated") if key in found)
    return f"`{command}`" + (f", commit `{commit}`." if commit else ".") + doubt


def _one_shot(found: Mapping[str, Any]) -> plt.Figure:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for area, (network, title) in zip(axes, pruning.NETWORKS.items(), strict=True):
        rules = found["summary"][network]
        for marker, (rule, words) in zip(MARKERS, pruning.ONE_SHOT.items(), strict=False):
            cut = [100 * float(sparsity) for sparsity in rules[rule]]
            area.plot(cut, [point["mean"] for point in rules[rule].values()], marker=marker, label=words.strip("*"))
        area.axhline(rules["dense"]["0"]["mean"], color="grey", linewidth=1, linestyle="--", label="dense")
        area.set(title=title, xlabel="weights cut, %", yscale="log")
    axes[0].set_ylabel("test error, %")
    axes[0].legend()
    return figure


def _out_of_distribution(found: Mapping[str, Any]) -> plt.Figure:
    table = found["table"]
    sets = [name for name in next(iter(table.values())) if name not in ("error", "nll", "ece")]
    figure, area = plt.subplots(figsize=(7, 3.2), layout="constrained")
    width = 0.8 / len(sets)
    for place, name in enumerate(sets):
        heights = [row[name]["mean"] for row in table.values()]
        area.bar([k + place * width for k in range(len(heights))], heights, width, label=name)
    area.set_xticks([k + 0.4 - width / 2 for k in range(len(table))], list(table), rotation=20)
    area.set(ylabel="AUROC, %", ylim=(50, 100))
    figure.legend(loc="outside right upper")
    return figure


def _signal_to_noise(found: Mapping[str, Any]) -> plt.Figure:
    figure, area = plt.subplots(figsize=(6, 3.2), layout="constrained")
    errors = found["test_error"]
    curves = {f"{prior}, {rule}": points for prior, rules in errors.items() for rule, points in rules.items()}
    for marker, (label, points) in zip(MARKERS, curves.items(), strict=False):
        area.plot([100 * float(cut) for cut in points], list(points.values()), marker=marker, label=label)
    area.set(xlabel="weights cut, %", ylabel="test error, %")
    area.legend()
    return figure


PLOTS: dict[str, Callable[[Mapping[str, Any]], plt.Figure]] = {
    "pruning without retraining": _one_shot,
    "out of distribution": _out_of_distribution,
    "pruning by signal to noise": _signal_to_noise,
}
"""What is drawn below a table."""
