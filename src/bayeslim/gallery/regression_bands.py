"""Every method on a regression with a gap.

Forty points with a gap in the middle, a network with one hidden layer, noise of known size. The line is the mean of the
prediction, the bands are one and two standard deviations of the prediction, noise included. Where there are no data, a
posterior should not be sure. Hamiltonian Monte Carlo samples the posterior itself and is the one to compare with.
Methods that stay close to one trained network are too sure in the gap; the linearised Laplace approximation, and few
snapshots, are not sure enough.

    p(y | x, D) = ∫ N(y | f(x; w), σ²) p(w | D) dw
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.app.style import Theme

NOISE, HIDDEN, EPOCHS = 0.1, 20, 150


@dataclass(frozen=True)
class Case:
    """A method, and what its network and its training need.

    Attributes:
        method: makes the method.
        fit: options of `fit`; without epochs, the network is trained plainly before.
        between: makes a layer between the activation and the last layer.
    """

    method: Callable[[], bl.Method]
    fit: dict[str, Any] = field(default_factory=dict)
    between: Callable[[], nn.Module] = nn.Identity


TRAINED: dict[str, Any] = {"epochs": EPOCHS, "lr": 2e-2, "lr_schedule": "half-then-linear"}
SAMPLED: dict[str, Any] = {"epochs": EPOCHS, "lr": 1e-3}
CASES = {
    "HMC": Case(lambda: bl.HMC(samples=60, warmup=80, leapfrog=25)),
    "Laplace, full": Case(lambda: bl.Laplace("full")),
    "Laplace, Kronecker": Case(lambda: bl.Laplace("kron")),
    "Laplace, subnetwork": Case(lambda: bl.Laplace("full", subset=bl.Subnetwork(size=30))),
    "Variational": Case(lambda: bl.Variational(std_rate=5.0), TRAINED),
    "IVON": Case(lambda: bl.IVON(memory=0.99), {"epochs": EPOCHS, "lr": 0.3}),
    "DeepEnsemble": Case(lambda: bl.DeepEnsemble(members=5), TRAINED),
    "Snapshot": Case(lambda: bl.Snapshot(cycles=5), {"epochs": EPOCHS, "lr": 2e-2}),
    "SVGD": Case(lambda: bl.SVGD(particles=10), TRAINED),
    "SWA": Case(lambda: bl.SWA(), {"epochs": EPOCHS, "lr": 2e-2}),
    "SWAG": Case(lambda: bl.SWAG(), {"epochs": EPOCHS, "lr": 1e-2}),
    "MultiSWAG": Case(lambda: bl.MultiSWAG(members=3), {"epochs": EPOCHS, "lr": 1e-2}),
    "SGLD": Case(lambda: bl.SGLD(samples=40), {"epochs": 3 * EPOCHS, "lr": 1.5e-3}),
    "PSGLD": Case(lambda: bl.PSGLD(samples=40), {"epochs": EPOCHS, "lr": 1e-2}),
    "SGHMC": Case(lambda: bl.SGHMC(samples=40), SAMPLED),
    "SGNHT": Case(lambda: bl.SGNHT(samples=40), SAMPLED),
    "Subspace": Case(lambda: bl.Subspace(rank=5, snapshots=20, inner=bl.HMC(40, 40, 8)), SAMPLED),
    "MCDropout": Case(lambda: bl.MCDropout(), TRAINED, lambda: nn.Dropout(0.05)),
    "MCBatchNorm": Case(lambda: bl.MCBatchNorm(), {}, lambda: nn.BatchNorm1d(HIDDEN)),
    "MCAugmentation": Case(lambda: bl.MCAugmentation(noise=0.1), TRAINED),
}
"""All methods of the library, by the title of their panel."""


@dataclass(frozen=True, eq=False)
class Found:
    """The data, and the mean and σ of each method's prediction on a line of inputs."""

    x: Tensor
    y: Tensor
    inputs: Tensor
    bands: dict[str, tuple[Tensor, Tensor]]


def measure(names: tuple[str, ...] = tuple(CASES)) -> Found:
    """Fit methods to the same data.

    Args:
        names: of `CASES`; all by default.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(20, 1, generator=generator) - 2.2, torch.rand(20, 1, generator=generator) + 1.2])
    y = torch.sin(2 * x) + NOISE * torch.randn(x.shape, generator=generator)
    inputs = torch.linspace(-3, 3, 121).unsqueeze(1)
    return Found(x, y, inputs.squeeze(1), {name: _band(CASES[name], x, y, inputs) for name in names})


def _band(case: Case, x: Tensor, y: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), case.between(), nn.Linear(HIDDEN, 1))
    likelihood = bl.likelihoods.Gaussian(NOISE)
    loader = bl.data.Loader(x, y, batch_size=len(x) // 2)
    if "epochs" not in case.fit:
        optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
        for _ in range(4 * EPOCHS):
            optimizer.zero_grad()
            likelihood.mean_nll(network(x), y).backward()
            optimizer.step()
    bnn = bl.bayesianize(network, case.method(), likelihood=likelihood, prior=bl.priors.Normal(1.0))
    quiet = {} if isinstance(case.method(), bl.MCBatchNorm) else {"progress": False}
    bnn.fit(loader, seed=0, **case.fit, **quiet)
    found = bl.predict(bnn, inputs, samples=100, generator=torch.Generator().manual_seed(0))
    return found.mean.squeeze(1), found.variance.sqrt().squeeze(1)


def draw(found: Found, theme: Theme) -> Figure:
    """Draw one panel for each method."""
    columns = 4
    rows = -(-len(found.bands) // columns)
    figure = Figure(figsize=(9.4, 1.75 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for ax in axes[len(found.bands) :]:
        ax.set_axis_off()
    for ax, (name, (mean, std)) in zip(axes, found.bands.items(), strict=False):
        for width, alpha in ((2, 0.2), (1, 0.3)):
            ax.fill_between(found.inputs, mean - width * std, mean + width * std, color="C0", alpha=alpha, linewidth=0)
        ax.plot(found.inputs, mean, "C0", linewidth=1.4)
        ax.plot(found.x, found.y, ".", color=theme.ink, markersize=3)
        ax.set_title(name, fontsize=10)
        ax.set(xlim=(-3, 3), ylim=(-3, 3), xticks=[-2, 0, 2], yticks=[-2, 0, 2])
    return figure
