"""ELBO ascent fits the posterior.

For any distribution q over the weights,

    log p(D) = L(q) + KL(q ‖ p(w | D)),          L(q) = E_q[log p(D | w)] − KL(q ‖ p(w)).

The left side does not depend on q. Each step that raises the bound L therefore lowers the distance from q to the
posterior by the same amount. The model is linear regression with one weight, where every term has a closed form.

Jordan et al. 1999, Machine Learning 37 · Graves 2011
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.app.style import Theme
from bayeslim.gallery.one_weight import Exact, gaussian_density, only, solve_on_grid, step_of

STEPS, NOISE, START, START_STD = 240, 0.5, -0.9, 0.15
SHOWN = (0, 30, 55, 240)


@dataclass(frozen=True, eq=False)
class Found:
    """The mean and σ of q after every step, with the bound and the divergence from the posterior."""

    exact: Exact
    means: Tensor
    stds: Tensor
    bounds: Tensor
    divergences: Tensor


def measure() -> Found:
    """Fit q by gradient steps, and follow it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, 12).unsqueeze(1)
    y = 0.9 * x + NOISE * torch.randn(x.shape, generator=generator)
    network = nn.Linear(1, 1, bias=False)
    nn.init.constant_(network.weight, START)
    likelihood, prior = bl.likelihoods.Gaussian(NOISE), bl.priors.Normal(1.0)
    exact = solve_on_grid(network, likelihood, prior, x, y, torch.linspace(-3, 3, 3001))
    method = bl.Variational(bl.families.DiagonalGaussian(initial_std=START_STD), std_rate=1.0)
    bnn = bl.bayesianize(network, method, likelihood=likelihood, prior=prior)
    followed = [(START, START_STD)]

    def follow(epoch: object) -> None:
        followed.append((only(bnn.posterior_.mean), math.sqrt(only(bnn.posterior_.variance))))

    bnn.fit([(x, y)], epochs=STEPS, lr=0.03, lr_schedule="half-then-linear", callbacks=[follow], seed=0, progress=False)
    means, stds = torch.tensor(followed, dtype=torch.float64).T
    return Found(exact, means, stds, _bounds(means, stds, x, y, prior), _divergences(exact, means, stds))


def _bounds(means: Tensor, stds: Tensor, x: Tensor, y: Tensor, prior: bl.priors.Prior) -> Tensor:
    """Compute E_q[log p(D | w)] − KL(q ‖ p) of every q."""
    fits = torch.distributions.Normal(means * x.double(), NOISE).log_prob(y.double()).sum(0)
    spread = x.double().square().sum() * stds.square() / (2 * NOISE**2)
    return torch.as_tensor(fits - spread - torch.stack([prior.kl(*pair) for pair in zip(means, stds, strict=True)]))


def _divergences(exact: Exact, means: Tensor, stds: Tensor) -> Tensor:
    """Compute KL(q ‖ posterior) of every q; the exact posterior is Gaussian."""
    step = step_of(exact.grid)
    centre = (exact.grid * exact.posterior).sum() * step
    width = ((exact.grid - centre).square() * exact.posterior).sum().mul(step).sqrt()
    posterior = torch.distributions.Normal(centre, width)
    return torch.distributions.kl_divergence(torch.distributions.Normal(means, stds), posterior)


def draw(found: Found, theme: Theme) -> Figure:
    """Draw q on its way to the posterior, and the two terms of the evidence."""
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    grid = found.exact.grid
    left.fill_between(grid, found.exact.posterior, color=theme.rest, label="posterior")
    for step in SHOWN:
        density = gaussian_density(grid, float(found.means[step]), float(found.stds[step]))
        share = step / SHOWN[-1]
        left.plot(
            grid, density, "C0" if share else "C1", alpha=0.35 + 0.65 * share, label=None if share else "q, start"
        )
        peak = int(density.argmax())
        left.annotate(f"{step}", (grid[peak], density[peak]), (0, 3), textcoords="offset points", ha="center", size=9)
    left.plot([], [], "C0", label="q after so many steps")
    left.set(xlabel="weight", ylabel="density", xlim=(-1.5, 2), title="q moves to the posterior")
    left.set_ylim(0, 1.25 * left.get_ylim()[1])
    left.legend(loc="upper right")
    steps = torch.arange(len(found.bounds))
    right.axhline(found.exact.log_evidence, color=theme.ink, linewidth=1.2, linestyle="--", label="log evidence")
    right.plot(steps, found.bounds, "C0", label="ELBO")
    right.fill_between(
        steps, found.bounds, found.exact.log_evidence, color="C1", alpha=0.25, linewidth=0, label="KL(q ‖ posterior)"
    )
    right.set(xlabel="step", ylabel="nats", title="ELBO + KL = log evidence")
    right.legend(loc="lower right")
    return figure
