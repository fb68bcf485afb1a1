"""The Rényi family, from inside the posterior to around it.

The posterior of linear regression with two correlated weights is Gaussian. q has independent weights and minimises the
Rényi divergence of order α, or maximises the bound L_α = log p(D) − D_α(q ‖ p(w | D)),

    D_α(q ‖ p) = 1/(α − 1) log ∫ q^α p^(1−α) dw.

With posterior variances λ₁ > λ₂ along the diagonals, the variance s of q solves

    2 (1 − α) s² + (λ₁ + λ₂)(2α − 1) s − 2 α λ₁ λ₂ = 0:

λ₂ for α → +∞ (q fits inside), the harmonic mean for α = 1 (the ELBO), the marginal variance for α → 0, and λ₁ for
α → −∞, where q encloses the posterior. At α < 0 the upper bound L_α is minimised.

Li & Turner 2016, arXiv:1602.02311
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

import bayeslim as bl
from bayeslim.app.style import Theme
from bayeslim.gallery.correlated import Regression, ellipse, solve_regression

ORDERS = (math.inf, 1.0, 0.5, 0.0, -math.inf)
LAST_ORDER = 100.0
"""The end of the axis, where the curve is at its limit to the eye."""
CURVE = torch.cat([-torch.logspace(2, -2, 80), torch.zeros(1), torch.logspace(-2, 2, 80)]).double()


@dataclass(frozen=True, eq=False)
class Found:
    """The posterior, the variance of q for each order, and that of `bl.Variational`, which fits α = 1."""

    regression: Regression
    variances: dict[float, float]
    curve: Tensor
    fitted_mean: Tensor
    fitted_variance: float


def best_variance(alpha: float, large: float, small: float) -> float:
    """Compute the variance of each weight of q for an order α.

    Args:
        alpha: the order.
        large: λ₁, the larger of the posterior's variances along the diagonals.
        small: λ₂, the smaller one.
    """
    if math.isinf(alpha):
        return small if alpha > 0 else large
    if alpha == 1:
        return 2 / (1 / large + 1 / small)
    a, b, c = 2 * (1 - alpha), (large + small) * (2 * alpha - 1), -2 * alpha * large * small
    root = math.sqrt(b * b - 4 * a * c)
    return (-b + root) / (2 * a)


def measure() -> Found:
    """Solve for every order, and fit α = 1 by gradients."""
    regression = solve_regression(correlation=-0.85)
    small, large = torch.linalg.eigvalsh(regression.covariance).tolist()
    bnn = regression.bayesian(bl.Variational(bl.families.DiagonalGaussian(initial_std=0.2)))
    loader = [(regression.x, regression.y)]
    bnn.fit(loader, epochs=300, lr=0.02, lr_schedule="half-then-linear", seed=0, progress=False)
    return Found(
        regression,
        {alpha: best_variance(alpha, large, small) for alpha in ORDERS},
        torch.tensor([best_variance(alpha, large, small) for alpha in CURVE.tolist()]),
        bnn.posterior_.mean["weight"].double().flatten(),
        float(bnn.posterior_.variance["weight"].mean()),
    )


LABELS = {
    math.inf: ("α → +∞", (6, 8), "left"),
    1.0: ("α = 1, ELBO", (8, -12), "left"),
    0.5: ("α = 0.5", (8, -10), "left"),
    0.0: ("α → 0, the marginals", (10, -12), "left"),
    -math.inf: ("α → −∞", (-2, -16), "right"),
}
STYLES = ("C5:", "C0-", "C2--", "C4-.", "C1-")


def draw(found: Found, theme: Theme) -> Figure:
    """Draw contours of the posterior and of q, and the width of q over α."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    centre = found.regression.mean
    left.fill(*ellipse(found.regression.covariance, centre), color=theme.rest)
    left.annotate(
        "posterior", ellipse(found.regression.covariance, centre)[:, 22].tolist(), (14, 12), textcoords="offset points",
        size=9, arrowprops={"arrowstyle": "-", "color": theme.quiet},
    )  # fmt: skip
    for (alpha, variance), style in zip(found.variances.items(), STYLES, strict=True):
        contour = ellipse(variance * torch.eye(2, dtype=torch.float64), centre)
        left.plot(*contour, style[:2], linestyle=style[2:])
        place = max(min(alpha, LAST_ORDER), -LAST_ORDER), math.sqrt(variance)
        right.plot(*place, "o", color=style[:2], markersize=7, zorder=3)
        words, offset, side = LABELS[alpha]
        right.annotate(words, place, offset, textcoords="offset points", ha=side, color=style[:2], weight="bold")
    left.set(xlabel="w₁", ylabel="w₂", title="Contours at one σ", aspect="equal")
    marginal = float(found.regression.covariance[0, 0].sqrt())
    right.axhline(marginal, color=theme.quiet, linewidth=1, linestyle="--", label="σ of the posterior's marginals")
    right.plot(CURVE, found.curve.sqrt(), color=theme.ink, zorder=2)
    fitted = math.sqrt(found.fitted_variance)
    right.plot(1.0, fitted, "x", color=theme.ink, markersize=9, zorder=4, linestyle="", label="fit of bl.Variational")
    right.set_xscale("symlog", linthresh=1)
    right.invert_xaxis()
    right.set_xticks([100, 10, 1, 0, -1, -10, -100], ["100", "10", "1", "0", "−1", "−10", "−100"])
    right.minorticks_off()
    right.set(xlabel="α", ylabel="σ of q", title="From mode-seeking to mass-covering")
    right.legend(loc="upper left")
    return figure
