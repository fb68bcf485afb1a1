"""Decision boundaries on two moons.

The shade is the probability of the second class, the line is where it is one half. A plain network is certain
everywhere but at its boundary, also far from all data. The average over a posterior,

    p(y | x, D) = ∫ p(y | x, w) p(w | D) dw,

is less certain away from the data, where networks that agree on the data disagree. Laplace and HMC show it. The
members of an ensemble, and the networks of SWAG, all find nearly the same boundary here and stay certain. Variational
inference with independent weights underfits so few data: it pays for every weight.

`bl.Laplace`, `bl.Variational`, `bl.DeepEnsemble`, `bl.HMC`, `bl.SWAG`
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.app.style import Theme

TRAINED: dict[str, Any] = {"epochs": 200, "lr": 1e-2, "lr_schedule": "half-then-linear"}
METHODS: dict[str, tuple[Callable[[], bl.Method] | None, dict[str, Any]]] = {
    "Plain network": (None, {}),
    "Laplace": (lambda: bl.Laplace("full"), {}),
    "Variational": (lambda: bl.Variational(std_rate=5.0), TRAINED),
    "DeepEnsemble": (lambda: bl.DeepEnsemble(members=5), TRAINED),
    "SWAG": (lambda: bl.SWAG(), {"epochs": 200, "lr": 2e-2}),
    "HMC": (lambda: bl.HMC(samples=40, warmup=60, leapfrog=15), {}),
}
SIDE = 60
REACH = 4.0


@dataclass(frozen=True, eq=False)
class Found:
    """The data, and p(y = 1) on a square of inputs by method."""

    x: Tensor
    y: Tensor
    probabilities: dict[str, Tensor]


def two_moons(count: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make points on two half circles that reach into each other."""
    angle = math.pi * torch.rand(count, generator=generator)
    upper = torch.arange(count) % 2 == 0
    x = torch.where(upper, angle.cos() - 0.5, 0.5 - angle.cos())
    y = torch.where(upper, angle.sin() - 0.25, 0.25 - angle.sin())
    points = torch.stack([x, y], 1) + noise * torch.randn(count, 2, generator=generator)
    return 1.5 * points, (~upper).float().unsqueeze(1)


def measure(names: tuple[str, ...] = tuple(METHODS)) -> Found:
    """Fit methods to the same points.

    Args:
        names: of `METHODS`; all by default.
    """
    x, y = two_moons(120, 0.12, torch.Generator().manual_seed(0))
    line = torch.linspace(-REACH, REACH, SIDE)
    square = torch.cartesian_prod(line, line).flip(1)
    loader, likelihood = bl.data.Loader(x, y, batch_size=60), bl.likelihoods.Bernoulli()
    probabilities = {}
    for name in names:
        make, options = METHODS[name]
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        if not options:
            _train(network, likelihood, x, y)
        if make is None:
            with torch.no_grad():
                probs = network(square).sigmoid()
        else:
            bnn = bl.bayesianize(network, make(), likelihood=likelihood, prior=bl.priors.Normal(1.0))
            bnn.fit(loader, seed=0, progress=False, **options)
            probs = bl.predict(bnn, square, samples=60, generator=torch.Generator().manual_seed(0)).probs
        probabilities[name] = probs.view(SIDE, SIDE)
    return Found(x, y, probabilities)


def _train(network: nn.Module, likelihood: bl.likelihoods.Likelihood, x: Tensor, y: Tensor) -> None:
    """Train a network plainly, to the mode of the posterior."""
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
    for _ in range(400):
        penalty = sum(p.square().sum() for p in network.parameters()) / (2 * len(x))
        optimizer.zero_grad()
        (likelihood.mean_nll(network(x), y) + penalty).backward()
        optimizer.step()


def draw(found: Found, theme: Theme) -> Figure:
    """Draw one panel for each method."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots(2, -(-len(found.probabilities) // 2), sharex=True, sharey=True).flatten()
    middle = theme.paper
    shades = LinearSegmentedColormap.from_list("classes", [theme.colours[0], middle, theme.colours[1]])
    line = torch.linspace(-REACH, REACH, SIDE).numpy()
    for ax, (name, probabilities) in zip(axes, found.probabilities.items(), strict=True):
        image = ax.pcolormesh(
            line, line, probabilities.numpy(), cmap=shades, vmin=0, vmax=1, rasterized=True, alpha=0.85
        )
        ax.contour(line, line, probabilities.numpy(), [0.5], colors=[theme.ink], linewidths=1.2)
        for label, marker in ((0, "o"), (1, "^")):
            chosen = found.y.squeeze(1) == label
            ax.scatter(
                *found.x[chosen].T,
                s=12,
                marker=marker,
                color=theme.colours[label],
                edgecolors=theme.ink,
                linewidths=0.5,
            )
        ax.set(title=name, xticks=[-3, 0, 3], yticks=[-3, 0, 3], aspect="equal")
    figure.colorbar(image, ax=axes.tolist(), label="p(second class)", shrink=0.6)
    return figure
