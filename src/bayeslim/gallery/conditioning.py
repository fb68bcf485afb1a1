"""Pruning is conditioning: the survivor moves.

To cut a weight is to ask for the posterior given that it is zero. For a Gaussian posterior N(μ, Σ) with w₂ cut,

    E[w₁ | w₂ = 0] = μ₁ − Σ₁₂ Σ₂₂⁻¹ μ₂          cost μ₂² / 2 Σ₂₂ nats.

Setting w₂ to zero and leaving w₁ where it was leaves the ridge of the posterior, and costs more. The posterior is that
of linear regression, which `bl.Laplace(structure="full")` computes exactly; `bl.prune` cuts w₂ and moves w₁.

LeCun, Denker & Solla 1990 · Hassibi & Stork 1993
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

import bayeslim as bl
from bayeslim.app.style import Theme
from bayeslim.gallery.correlated import Regression, ellipse, solve_regression

SEED = 7
"""Of the noise in the data."""


@dataclass(frozen=True, eq=False)
class Found:
    """The posterior, the two ways to cut w₂, and what each costs in nats of −log p(w | D)."""

    regression: Regression
    covariance: Tensor
    zeroed: Tensor
    moved: Tensor
    moved_std: float
    zeroed_cost: float
    moved_cost: float


def measure() -> Found:
    """Cut the smaller weight of a regression, with and without moving the other."""
    regression = solve_regression(correlation=0.8, seed=SEED)
    bnn = regression.bayesian(bl.Laplace(structure="full"))
    bnn.fit([(regression.x, regression.y)], progress=False)
    posterior = bnn.posterior_
    assert isinstance(posterior, bl.posteriors.Dense)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
    mean = posterior.mean["weight"].double().flatten()
    moved = pruned.posterior_.mean["weight"].double().flatten()
    zeroed = torch.where(moved == 0, 0.0, mean)
    precision = torch.linalg.inv(posterior.covariance)

    def cost(point: Tensor) -> float:
        return float(0.5 * (point - mean) @ precision @ (point - mean))

    std = float(pruned.posterior_.variance["weight"].flatten()[moved != 0].sqrt())
    return Found(regression, posterior.covariance, zeroed, moved, std, cost(zeroed), cost(moved))


def draw(found: Found, theme: Theme) -> Figure:
    """Draw the posterior with both cuts, and the density of the survivor."""
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    mean = found.regression.mean
    for radius, alpha in ((3, 0.35), (2, 0.6), (1, 1.0)):
        left.fill(*ellipse(found.covariance, mean, radius), color=theme.rest, alpha=alpha, linewidth=0)
    left.axhline(0, color=theme.quiet, linewidth=1)
    arrow = {"arrowstyle": "->", "linewidth": 1.8, "shrinkA": 4, "shrinkB": 4}
    for point, colour in ((found.zeroed, "C1"), (found.moved, "C0")):
        left.annotate("", point.tolist(), mean.tolist(), arrowprops={**arrow, "color": colour})
        left.plot(*point.tolist(), "o", color=colour, markersize=7)
    left.plot(*mean.tolist(), "o", color=theme.ink, markersize=7)
    texts = (
        (mean, "μ", theme.ink, (8, 6), "left"),
        (found.zeroed, f"set to zero: {found.zeroed_cost:.1f} nats", "C1", (-6, -16), "right"),
        (found.moved, f"conditioned: {found.moved_cost:.1f} nats", "C0", (6, -16), "left"),
    )
    for point, words, colour, offset, side in texts:
        left.annotate(
            words, point.tolist(), offset, textcoords="offset points", ha=side, color=colour, size=10, weight="bold"
        )
    left.set(xlabel="w₁", ylabel="w₂", title="Cut w₂: where should w₁ go?", xlim=(0.0, 2.4), ylim=(-0.55, 1.4))
    grid = torch.linspace(0, 2.4, 400, dtype=torch.float64)
    normal = torch.distributions.Normal
    before = normal(mean[0], found.covariance[0, 0].sqrt()).log_prob(grid).exp()
    after = normal(found.moved[0], found.moved_std).log_prob(grid).exp()
    right.fill_between(grid, before, color=theme.rest, label="before the cut")
    right.plot(grid, after, "C0", label="given w₂ = 0")
    right.vlines(float(found.zeroed[0]), 0, 1.05 * float(after.max()), "C1", "--", label="w₁ left where it was")
    right.set(xlabel="w₁", ylabel="density", title="The survivor", xlim=(0, 2.4), ylim=(0, 1.5 * float(after.max())))
    right.legend(loc="upper right")
    return figure
