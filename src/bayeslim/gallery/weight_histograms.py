"""Weights over training, for a Gaussian and a scale-mixture prior.

Posterior means of all weights of a small network on digits, epoch after epoch. Both priors let weights that the data do
not need shrink to zero. The scale mixture

    p(w) = π N(w | 0, σ₁²) + (1 − π) N(w | 0, σ₂²),     π = ½, σ₁ = 1, σ₂ = e⁻⁶

has a narrow component for them: most gather in a hump around zero, and the few others are free to be large. The
Gaussian prior leaves one broad hump; the spike on it are weights of pixels that are empty in all digits.

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
from bayeslim.gallery.digits_network import fit_digits, weights_of
from bayeslim.train.fit import Epoch

EPOCHS = (1, 4, 8, 14, 22, 30)
EDGES = torch.linspace(-0.75, 0.75, 76)


@dataclass(frozen=True, eq=False)
class Found:
    """Histograms of the weights by prior and epoch: the fraction of weights in each bin."""

    histograms: dict[str, dict[int, Tensor]]
    priors: dict[str, bl.priors.Prior]


def measure() -> Found:
    """Train under both priors, and count the weights on the way."""
    priors: dict[str, bl.priors.Prior] = {
        "Gaussian prior": bl.priors.Normal(1.0),
        "Scale-mixture prior": bl.priors.ScaleMixture(0.5, 1.0, math.exp(-6)),
    }
    histograms: dict[str, dict[int, Tensor]] = {name: {} for name in priors}
    for name, prior in priors.items():

        def count(epoch: Epoch, name: str = name) -> None:
            if epoch.number in EPOCHS:
                weights = weights_of(epoch.bnn.posterior_.mean)
                histograms[name][epoch.number] = torch.histogram(weights, EDGES).hist / len(weights)

        fit_digits(prior, EPOCHS[-1], [count])
    return Found(histograms, priors)


def draw(found: Found, theme: Theme) -> Figure:
    """Draw the histograms one behind the other, the last epoch in front."""
    figure = Figure(figsize=(8.6, 4.4), layout="constrained")
    axes = figure.subplots(1, len(found.histograms), sharey=True)
    middles = (EDGES[1:] + EDGES[:-1]) / 2
    for ax, (name, histograms), colour in zip(axes, found.histograms.items(), ("C0", "C1"), strict=True):
        for place, (epoch, shares) in enumerate(histograms.items()):
            height = shares.sqrt()
            base = -place * 0.16
            ax.fill_between(middles, base, base + height, color=theme.paper, linewidth=0, zorder=2 * place)
            ax.fill_between(middles, base, base + height, color=colour, alpha=0.3, linewidth=0, zorder=2 * place)
            ax.plot(middles, base + height, colour, linewidth=1.3, zorder=2 * place + 1)
            if colour == "C0":
                ax.text(-0.8, base, f"epoch {epoch}", size=9, ha="right")
        ax.set(xlabel="posterior mean μ", title=name, yticks=[])
        ax.spines["left"].set_visible(False)
    figure.supxlabel("Heights are square roots of the share of weights, so that small shares can be seen.", size=9)
    return figure
