"""Weights that survive a cut by magnitude and by signal-to-noise ratio.

A cut by magnitude takes all weights below a threshold: the histogram of the others has a hole with straight sides. A
cut by |μ| / σ keeps small weights of which the posterior is certain, and cuts larger ones of which it is not: the sides
of the hole slope. The errors are those of the mean network without retraining. Independent weights understate σ, so the
ratio is no better guide than the magnitude here. A posterior with correlations also moves the survivors
(`conditioning`).

Blundell et al. 2015, arXiv:1505.05424
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

import bayeslim as bl
from bayeslim.app.style import Theme
from bayeslim.gallery.digits_network import fit_digits, test_error, weights_of

SPARSITIES = (0.0, 0.25, 0.5, 0.75, 0.95)
CRITERIA = {"Magnitude, |μ|": "magnitude", "Signal to noise, |μ| / σ": "snr"}
EDGES = torch.linspace(-0.5, 0.5, 101)


@dataclass(frozen=True, eq=False)
class Found:
    """The surviving weights and the test error, by criterion and sparsity."""

    survivors: dict[str, dict[float, Tensor]]
    errors: dict[str, dict[float, float]]


def measure() -> Found:
    """Cut one network by both criteria."""
    bnn = fit_digits(bl.priors.ScaleMixture(0.5, 1.0, math.exp(-6)), epochs=30)
    survivors: dict[str, dict[float, Tensor]] = {title: {} for title in CRITERIA}
    errors: dict[str, dict[float, float]] = {title: {} for title in CRITERIA}
    for title, criterion in CRITERIA.items():
        for sparsity in SPARSITIES:
            pruned = bnn
            if sparsity:
                pruned = bl.prune(bnn, bl.Budget(sparsity=sparsity), criterion=criterion)
            weights = weights_of(pruned.posterior_.mean)
            survivors[title][sparsity] = weights[weights != 0]
            errors[title][sparsity] = test_error(pruned.mean_network())
    return Found(survivors, errors)


def draw(found: Found, theme: Theme) -> Figure:
    """Draw histograms of the survivors, one line for each cut."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, (title, weights) in zip(axes, found.survivors.items(), strict=True):
        for place, (sparsity, values) in enumerate(weights.items()):
            counts = torch.histogram(values, EDGES).hist
            colour = theme.ink if sparsity == 0 else f"C{place - 1}"
            error = f"error {100 * found.errors[title][sparsity]:.1f} %"
            label = f"{100 * sparsity:.0f} % cut, {error}" if sparsity else f"all, {error}"
            ax.stairs(counts, EDGES, color=colour, linewidth=1.4, label=label)
        ax.set(xlabel="posterior mean μ", title=title, yscale="log", ylim=(0.8, None))
        ax.legend(loc="upper right", fontsize=9)
    axes[0].set_ylabel("weights")
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(low, 60 * high)
    return figure
