"""Laplace approximations, good and bad.

The Laplace approximation is the Gaussian at the mode with the curvature there:

    p(w | D) ≈ N(w*, H⁻¹),          H = −∇² log p(w*, D)

It is good where there are many data: the posterior of 60 examples is close to a Gaussian. With four examples that a
threshold separates, the posterior is skewed, and the mode is not its centre. For w² x it describes one of two modes.
`bl.Laplace` computes all three; for these networks its generalised Gauss-Newton matrix is the Hessian, or close to it.

MacKay 1992, Neural Computation 4 · Ritter, Botev & Barber 2018
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.app.style import Theme
from bayeslim.gallery.one_weight import Exact, Squared, gaussian_density, only, solve_on_grid


@dataclass(frozen=True, eq=False)
class Fit:
    """An exact posterior and its Laplace approximation, on a grid."""

    title: str
    exact: Exact
    laplace: Tensor

    @property
    def distance(self) -> float:
        """The total variation distance: 0 if they are equal, 1 if they do not overlap."""
        return self.exact.distance(self.laplace)


def measure() -> list[Fit]:
    """Approximate three posteriors."""
    generator = torch.Generator().manual_seed(0)
    many = torch.randn(60, 1, generator=generator)
    labels = torch.bernoulli((1.5 * many).sigmoid(), generator=generator)
    few, classes = torch.tensor([[-1.0], [-0.4], [0.4], [1.0]]), torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    x = torch.linspace(0.5, 2, 6).unsqueeze(1)
    y = 1.2 * x + 0.8 * torch.randn(x.shape, generator=generator)
    binary = bl.likelihoods.Bernoulli()
    return [
        _fit("Good: 60 examples", _linear(), binary, 3.0, many, labels, torch.linspace(-1, 5, 1501)),
        _fit("Skewed: 4 examples", _linear(), binary, 5.0, few, classes, torch.linspace(-6, 22, 1501)),
        _fit("Two modes: w² x", Squared(0.5), bl.likelihoods.Gaussian(1.2), 1.0, x, y, torch.linspace(-3, 3, 1501)),
    ]


def _linear() -> nn.Module:
    network = nn.Linear(1, 1, bias=False)
    nn.init.ones_(network.weight)
    return network


def _fit(
    title: str, network: nn.Module, likelihood: bl.likelihoods.Likelihood, std: float, x: Tensor, y: Tensor,
    grid: Tensor,
) -> Fit:  # fmt: skip
    prior = bl.priors.Normal(std)
    bnn = bl.bayesianize(network, bl.Laplace(structure="full"), likelihood=likelihood, prior=prior)
    bnn.fit([(x, y)], epochs=150, lr=0.1, lr_schedule="half-then-linear", seed=0, progress=False)
    found = bnn.posterior_
    laplace = gaussian_density(grid.double(), only(found.mean), math.sqrt(only(found.variance)))
    return Fit(title, solve_on_grid(network, likelihood, prior, x, y, grid), laplace)


def draw(found: list[Fit], theme: Theme) -> Figure:
    """Draw each approximation over the posterior."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    for ax, fit in zip(figure.subplots(1, len(found)), found, strict=True):
        ax.fill_between(fit.exact.grid, fit.exact.posterior, color=theme.rest, label="posterior")
        ax.plot(fit.exact.grid, fit.laplace, "C1", label="Laplace")
        ax.set(xlabel="weight", title=fit.title, yticks=[])
        ax.set_xlim(float(fit.exact.grid[0]), float(fit.exact.grid[-1]))
        ax.set_ylim(0, 1.3 * float(torch.maximum(fit.laplace, fit.exact.posterior).max()))
        ax.text(
            0.98, 0.97, f"total variation\ndistance {fit.distance:.2f}", transform=ax.transAxes, ha="right", va="top",
            size=9,
        )  # fmt: skip
    figure.axes[0].legend(loc="upper left")
    figure.axes[0].set_ylabel("density")
    return figure
