"""Signal-to-noise ratios, with cut-offs.

A weight is worth keeping if its posterior is far from zero: |μ| / σ is large. Ratios are in decibels, 10 log₁₀ |μ| / σ,
as in the paper. The dashed lines cut 25, 50, 75 and 95 % of the weights. The prior is a scale mixture. On MNIST with
1,200 hidden units the paper finds two humps, of weights that can go and of others; on a thousand small digits there is
one, and the last cut goes too far.

Blundell et al. 2015, arXiv:1505.05424 · Graves 2011
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

SPARSITIES = (0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, eq=False)
class Found:
    """The ratios of all weights in decibels, the cut-offs by sparsity, and the test error at each."""

    decibels: Tensor
    cutoffs: dict[float, float]
    errors: dict[float, float]


def measure() -> Found:
    """Train a network, rank its weights, and cut them."""
    bnn = fit_digits(bl.priors.ScaleMixture(0.5, 1.0, math.exp(-6)), epochs=30)
    ratio = weights_of(bnn.posterior_.mean).abs() / weights_of(bnn.posterior_.std)
    decibels = 10 * ratio.clamp_min(1e-6).log10()
    errors = {0.0: test_error(bnn.mean_network())}
    for sparsity in SPARSITIES:
        errors[sparsity] = test_error(bl.prune(bnn, bl.Budget(sparsity=sparsity), criterion="snr").mean_network())
    return Found(decibels, {s: float(decibels.quantile(s)) for s in SPARSITIES}, errors)


def draw(found: Found, theme: Theme) -> Figure:
    """Draw the histogram and the cumulative share, with the cut-offs in both."""
    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1.4, 1))
    low = float(found.decibels.quantile(0.005))
    shown = found.decibels.clamp_min(low)
    top.hist(shown, bins=80, color=theme.rest)
    bottom.plot(shown.sort().values, torch.linspace(0, 100, len(shown)), color=theme.ink)
    for place, (sparsity, cutoff) in enumerate(found.cutoffs.items()):
        words = f"{100 * sparsity:.0f} % cut, error {100 * found.errors[sparsity]:.1f} %"
        top.axvline(cutoff, color=f"C{place}", linestyle="--", label=words)
        bottom.axvline(cutoff, color=f"C{place}", linestyle="--")
    top.legend(loc="upper left")
    top.set(ylabel="weights", title=f"Before the cut, error {100 * found.errors[0.0]:.1f} %")
    bottom.set(xlabel="signal-to-noise ratio |μ| / σ, dB", ylabel="cumulative, %")
    return figure
