"""One Gaussian misses a mode, a mixture finds both.

The data are explained by w and by −w alike: the network is w² x. A Gaussian q settles on one of the two modes, since
the KL divergence of variational inference punishes mass where the posterior has none. It loses the other half of the
mass, and log 2 of the evidence. A mixture of two Gaussians fits both:

    q(w) = Σ_c π_c N(w | μ_c, σ_c²)

`bl.families.MixtureOfGaussians` · Jaakkola & Jordan 1998
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

import bayeslim as bl
from bayeslim.app.style import Theme
from bayeslim.gallery.one_weight import Exact, Squared, gaussian_density, only, solve_on_grid

NOISE = 1.2


@dataclass(frozen=True, eq=False)
class Found:
    """The exact posterior, the two fits as densities on its grid, and their bounds on the evidence."""

    exact: Exact
    gaussian: Tensor
    mixture: Tensor
    gaussian_bound: float
    mixture_bound: float


def measure() -> Found:
    """Fit both families to the same data."""
    generator = torch.Generator().manual_seed(1)
    x = torch.linspace(0.5, 2, 10).unsqueeze(1)
    y = 1.2 * x + NOISE * torch.randn(x.shape, generator=generator)
    likelihood, prior = bl.likelihoods.Gaussian(NOISE), bl.priors.Normal(1.0)
    exact = solve_on_grid(Squared(0.6), likelihood, prior, x, y, torch.linspace(-3, 3, 2401))
    families = {
        "one": (Squared(0.6), bl.families.DiagonalGaussian(initial_std=0.3)),
        "two": (Squared(0.0), bl.families.MixtureOfGaussians(components=2, initial_std=0.3, spread=2.0)),
    }
    fits = {}
    for name, (network, family) in families.items():
        torch.manual_seed(0)  # of the starts of the components, on either side of zero
        method = bl.Variational(family, estimator="shared", samples=2, antithetic=True)
        bnn = bl.bayesianize(network, method, likelihood=likelihood, prior=prior, sites="all")
        bnn.fit([(x, y)], epochs=250, lr=0.03, lr_schedule="half-then-linear", seed=0, progress=False)
        bound = bl.log_evidence(bnn, [(x, y)], 150, generator=torch.Generator().manual_seed(0), progress=False)
        fits[name] = bnn, bound.value
    one, two = fits["one"][0].posterior_, fits["two"][0].posterior_
    assert isinstance(two, bl.posteriors.Mixture)
    parts = zip(two.log_weights.exp(), two.means["weight"], two.stds["weight"], strict=True)
    return Found(
        exact,
        gaussian_density(exact.grid, only(one.mean), math.sqrt(only(one.variance))),
        torch.stack([share * gaussian_density(exact.grid, float(mean), float(std)) for share, mean, std in parts]).sum(
            0
        ),
        fits["one"][1],
        fits["two"][1],
    )


def draw(found: Found, theme: Theme) -> Figure:
    """Draw both fits over the posterior."""
    figure = Figure(figsize=(8.6, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    fits = (
        ("One Gaussian", found.gaussian, found.gaussian_bound, "C1"),
        ("A mixture of two", found.mixture, found.mixture_bound, "C0"),
    )
    for ax, (title, density, bound, colour) in zip(axes, fits, strict=True):
        ax.fill_between(found.exact.grid, found.exact.posterior, color=theme.rest, label="posterior")
        ax.plot(found.exact.grid, density, colour, label="q")
        ax.set(xlabel="weight", xlim=(-2.2, 2.2), title=title)
        words = f"ELBO {bound:.2f}\nlog evidence {found.exact.log_evidence:.2f}".replace("-", "−")
        ax.text(0.03, 0.72, words, transform=ax.transAxes, va="top", size=9)
        ax.legend(loc="upper left")
    axes[0].set_ylabel("density")
    axes[0].set_ylim(0, 1.15 * float(found.gaussian.max()))
    return figure
