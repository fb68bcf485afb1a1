"""The Rényi bound against α and K, beside the true evidence.

From K draws of q, with log w_k = log p(D | w_k) + log p(w_k) − log q(w_k),

    L̂_α,K = 1/(1 − α) log 1/K Σ_k exp((1 − α) log w_k).

Its expectation falls as α rises. At K = 1 every order gives the ELBO. More draws raise it for α < 1 and lower it for
α > 1, towards L_α. For α ≥ 0 it never exceeds log p(D); for α < 0 it ends above, so that some K comes out right by
chance. The model is linear regression with two correlated weights, whose evidence is exact, and q has independent
weights.

Li & Turner 2016, arXiv:1602.02311 · Burda, Grosse & Salakhutdinov 2016, arXiv:1509.00519
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

import bayeslim as bl
from bayeslim.app.style import Theme
from bayeslim.evidence.renyi import bound
from bayeslim.gallery.correlated import Regression, solve_regression

ALPHAS = torch.linspace(-1.5, 3, 31).double()
DRAWS = (1, 2, 5, 10, 50)
SHOWN = (-1.0, 0.0, 0.5, 1.0, 2.0)
REPEATS = 20_000


@dataclass(frozen=True, eq=False)
class Found:
    """The evidence, and the expected bound.

    Attributes:
        log_evidence: log p(D), exact.
        estimates: E[L̂_α,K] by (α, K), with the standard error of its Monte-Carlo estimate.
        limits: L_α, the limit of many draws, exact.
    """

    log_evidence: float
    estimates: dict[tuple[float, int], tuple[float, float]]
    limits: dict[float, float]


def measure() -> Found:
    """Estimate the bound many times for every order and number of draws."""
    regression = solve_regression(correlation=-0.6)
    bnn = regression.bayesian(bl.Variational(bl.families.DiagonalGaussian(initial_std=0.2)))
    loader = [(regression.x, regression.y)]
    bnn.fit(loader, epochs=200, lr=0.02, lr_schedule="half-then-linear", seed=0, progress=False)
    draws = bnn.posterior_.sample(REPEATS * DRAWS[-1], generator=torch.Generator().manual_seed(1))["weight"]
    mean, std = bnn.posterior_.mean["weight"].double(), bnn.posterior_.variance["weight"].double().sqrt()
    log_weights = log_weights_of(draws.double().squeeze(1), mean.flatten(), std.flatten(), regression)
    alphas = sorted({*ALPHAS.tolist(), *SHOWN})
    estimates = {}
    for count in DRAWS:
        groups = log_weights[: REPEATS * count].view(count, REPEATS)
        for alpha in alphas:
            values = bound(groups, alpha)
            estimates[alpha, count] = float(values.mean()), float(values.std()) / math.sqrt(REPEATS)
    limits = {alpha: limit(alpha, mean.flatten(), std.flatten(), regression) for alpha in alphas}
    return Found(regression.log_evidence, estimates, limits)


def log_weights_of(draws: Tensor, mean: Tensor, std: Tensor, regression: Regression) -> Tensor:
    """Compute log p(D, w) − log q(w) of draws, (draws,)."""
    outputs = draws @ regression.x.double().T
    log_lik = torch.distributions.Normal(outputs, regression.noise).log_prob(regression.y.double().T).sum(1)
    prior = bl.priors.Normal(1.0).log_prob(draws).sum(1)
    return torch.as_tensor(log_lik + prior - torch.distributions.Normal(mean, std).log_prob(draws).sum(1))


def limit(alpha: float, mean: Tensor, std: Tensor, regression: Regression) -> float:
    """Compute L_α = log p(D) − D_α(q ‖ posterior) of two Gaussians.

    It is infinite where the integral diverges.
    """
    own, other = torch.diag(std.square()), regression.covariance
    if alpha == 1:
        pair = [torch.distributions.MultivariateNormal(m, c) for m, c in ((mean, own), (regression.mean, other))]
        return regression.log_evidence - float(torch.distributions.kl_divergence(*pair))
    precision = alpha * torch.linalg.inv(own) + (1 - alpha) * torch.linalg.inv(other)
    if float(torch.linalg.eigvalsh(precision).min()) <= 0:
        return -math.inf if alpha > 1 else math.inf
    mixed = (1 - alpha) * own + alpha * other
    gap = mean - regression.mean
    determinants = mixed.logdet() - (1 - alpha) * own.logdet() - alpha * other.logdet()
    divergence = 0.5 * alpha * gap @ torch.linalg.solve(mixed, gap) - determinants / (2 * (alpha - 1))
    return regression.log_evidence - float(divergence)


def draw(found: Found, theme: Theme) -> Figure:
    """Draw the bound over α for several K, and over K for several α."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for ax in (left, right):
        ax.axhline(found.log_evidence, color=theme.ink, linewidth=1.2, linestyle="--", label="log evidence")
    alphas = ALPHAS.tolist()
    for place, count in enumerate((1, 2, 10, 50)):
        values = [found.estimates[alpha, count][0] for alpha in alphas]
        left.plot(alphas, values, f"C{place}", label=f"K = {count}")
    left.plot(alphas, [found.limits[alpha] for alpha in alphas], ":", color=theme.quiet, label="K → ∞")
    left.axvspan(alphas[0], 0, color=theme.rest, alpha=0.4, linewidth=0)
    left.text(alphas[0] + 0.1, 0.03, "no lower bound", transform=left.get_xaxis_transform(), size=9)
    left.set(xlabel="α", ylabel="expected bound, nats", title="Against α", xlim=(alphas[0], alphas[-1]))
    left.set_ylim(found.log_evidence - 0.65, found.log_evidence + 0.25)
    left.legend(loc="upper right", ncols=2)
    for alpha, style in zip(SHOWN, ("C1-", "C0-", "C2--", "C3-.", "C4:"), strict=True):
        values = [found.estimates[alpha, count][0] for count in DRAWS]
        label = f"α = {alpha:g}".replace("-", "−")
        right.plot(DRAWS, values, style[:2], linestyle=style[2:], marker="o", markersize=4, label=label)
    right.set_xscale("log")
    right.set_xticks(DRAWS, [str(count) for count in DRAWS])
    right.minorticks_off()
    right.set(xlabel="draws K", title="Against the number of draws")
    right.legend(loc="lower right", ncols=2)
    return figure
