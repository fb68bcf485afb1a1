"""A prior shifts the confidence.

Ten examples of two classes, and logistic regression with one weight. The likelihood alone prefers a large weight, and
the network that maximises it is almost certain a short way from the data. The prior says that weights are of size one.
The posterior lies between the two, and the prediction averages over it:

    p(w | D) = p(D | w) p(w) / p(D)          p(y | x, D) = ∫ p(y | x, w) p(w | D) dw

The bars are draws of Hamiltonian Monte Carlo (`bl.HMC`), the line is the exact posterior on a grid.

Bishop 2006, Pattern Recognition and Machine Learning, sections 1.2.3 and 4.5
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.app.style import Theme
from bayeslim.gallery.one_weight import Exact, solve_on_grid, step_of

X = torch.tensor([-2.2, -1.6, -1.1, -0.7, -0.3, 0.2, 0.6, 0.9, 1.5, 2.3]).unsqueeze(1)
Y = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0]).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class Found:
    """The densities of the weight, and the predictions on a line of inputs."""

    exact: Exact
    draws: Tensor
    inputs: Tensor
    likeliest: Tensor
    averaged: Tensor
    exact_average: Tensor


def measure() -> Found:
    """Sample the posterior, and predict with and without the prior."""
    prior, likelihood = bl.priors.Normal(1.0), bl.likelihoods.Bernoulli()
    network = nn.Linear(1, 1, bias=False)
    nn.init.ones_(network.weight)
    exact = solve_on_grid(network, likelihood, prior, X, Y, torch.linspace(-4, 16, 1601))
    bnn = bl.bayesianize(network, bl.HMC(samples=800, warmup=100, leapfrog=5), likelihood=likelihood, prior=prior)
    bnn.fit([(X, Y)], seed=0, progress=False)
    inputs = torch.linspace(-4, 4, 161).unsqueeze(1)
    averaged = bl.predict(bnn, inputs).probs
    assert averaged is not None
    assert isinstance(bnn.posterior_, bl.posteriors.Particles)
    outputs = inputs.double() * exact.grid  # (inputs, grid)
    step = step_of(exact.grid)
    likeliest = exact.grid[exact.likelihood.argmax()]
    return Found(
        exact,
        bnn.posterior_.values["weight"].flatten(),
        inputs.squeeze(1),
        (inputs.squeeze(1) * likeliest).sigmoid(),
        averaged.squeeze(1),
        (outputs.sigmoid() * exact.posterior * step).sum(1),
    )


def draw(found: Found, theme: Theme) -> Figure:
    """Draw the densities of the weight, and the predictions."""
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    grid = found.exact.grid
    left.hist(found.draws, bins=20, density=True, color=theme.rest, label="draws of bl.HMC")
    left.plot(grid, found.exact.prior, "C2--", label="prior")
    left.plot(grid, found.exact.likelihood, "C1-.", label="likelihood, scaled")
    left.plot(grid, found.exact.posterior, "C0", label="posterior")
    left.set(xlabel="weight", ylabel="density", xlim=(-3, 10), title="The weight")
    left.legend()
    right.axhline(0.5, color=theme.rest, linewidth=1, zorder=0)
    right.plot(found.inputs, found.likeliest, "C1-.", label="likeliest weight")
    right.plot(found.inputs, found.averaged, "C0", label="average over the posterior")
    right.plot(X, Y, "o", color=theme.ink, markersize=5, label="data")
    right.set(
        xlabel="input x",
        ylabel="p(y = 1 | x)",
        title="The prediction",
        ylim=(-0.05, 1.5),
        yticks=[0, 0.25, 0.5, 0.75, 1],
    )
    right.legend(loc="upper left")
    return figure
