"""Networks with posteriors written down by hand, for pruning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import bayeslim as bl
from bayeslim.methods.base import Method
from bayeslim.posteriors import Dense, Diagonal, Kronecker, KroneckerFactors
from bayeslim.results import Fit


@dataclass(frozen=True)
class Given(Method):
    """A method whose posterior is whatever lies in the state."""

    name = "given"

    def fit(self, bnn, loader, **options):
        bnn.state["fits"] = bnn.state.get("fits", 0) + 1
        return Fit()

    def posterior(self, bnn):
        return bnn.state["posterior"]


def two_layers(seed=0, inputs=5, hidden=6, outputs=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def given(model, posterior, prior=None):
    bnn = bl.bayesianize(model, Given(), likelihood=bl.likelihoods.Categorical(), prior=prior, num_data=100)
    bnn.state["posterior"] = posterior
    return bnn.eval()


def mean_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def psd(n, generator, ridge=0.3):
    root = torch.randn(n, n + 2, generator=generator, dtype=torch.float64)
    return root @ root.T / n + ridge * torch.eye(n, dtype=torch.float64)


def diagonal(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    mean = mean_of(model)
    std = {n: torch.rand(m.shape, generator=generator, dtype=torch.float64) + 0.05 for n, m in mean.items()}
    return Diagonal(mean, std)


def kronecker(model, seed=1, prior=0.5):
    generator = torch.Generator().manual_seed(seed)
    factors = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            factors.append(
                KroneckerFactors.of(
                    f"{name}.weight",
                    outputs=psd(module.out_features, generator, 0.0),
                    inputs=psd(module.in_features + 1, generator, 0.0),
                    bias=f"{name}.bias",
                )
            )
    return Kronecker(mean_of(model), factors, prior)


def dense(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    mean = mean_of(model)
    return Dense(mean, psd(sum(m.numel() for m in mean.values()), generator))


FAMILIES = {"diagonal": diagonal, "kronecker": kronecker, "dense": dense}


def covariance_of(posterior):
    """Σ over all weights in the order of the mean, one column a product."""
    mean = posterior.mean
    size = sum(m.numel() for m in mean.values())
    if isinstance(posterior, Diagonal):
        return torch.diag(torch.cat([v.flatten() for v in posterior.variance.values()]))
    basis = torch.eye(size, dtype=torch.float64)
    parts = basis.split([m.numel() for m in mean.values()], dim=1)
    stacked = {name: part.reshape(size, *mean[name].shape) for name, part in zip(mean, parts, strict=True)}
    image = posterior.covariance_product(stacked)
    return torch.cat([image[name].flatten(1) for name in mean], dim=1)


def flat(params):
    return torch.cat([t.flatten() for t in params.values()])


def flat_places(mean, group):
    """Places of a group's weights in the flat order of the mean."""
    starts, total = {}, 0
    for name, value in mean.items():
        starts[name], total = total, total + value.numel()
    return torch.cat([index + starts[name] for name, index in group.items()])
