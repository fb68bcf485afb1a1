"""Networks with one weight, whose posterior and evidence are sums over a grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import bayeslim as bl


class Squared(nn.Module):
    """The function w² x, which does not tell the sign of w."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, x: Tensor) -> Tensor:
        """Compute w² x."""
        return self.weight.square() * x


@dataclass(frozen=True, eq=False)
class Exact:
    """A posterior on a grid.

    Attributes:
        grid: values of the weight, evenly spaced, (G,).
        prior: its density, (G,).
        likelihood: p(D|w), scaled so that it integrates to one, (G,).
        posterior: its density, (G,).
        log_evidence: log p(D).
    """

    grid: Tensor
    prior: Tensor
    likelihood: Tensor
    posterior: Tensor
    log_evidence: float

    def distance(self, density: Tensor) -> float:
        """Compute the total variation distance of the posterior from a density."""
        return float(0.5 * (density - self.posterior).abs().sum() * step_of(self.grid))


def solve_on_grid(
    network: nn.Module, likelihood: bl.likelihoods.Likelihood, prior: bl.priors.Prior, x: Tensor, y: Tensor,
    grid: Tensor,
) -> Exact:  # fmt: skip
    """Compute the exact posterior of the only weight of a network."""
    (name, weight), *_ = network.named_parameters()
    with torch.no_grad():
        outputs = vmap(lambda w: functional_call(network, {name: w.view_as(weight)}, (x,)))(grid)
        log_lik = vmap(lambda f: likelihood.log_prob(f, y).sum())(outputs).double()
    log_prior, log_step = prior.log_prob(grid.double()), step_of(grid).log()
    evidence = (log_lik + log_prior).logsumexp(0) + log_step
    return Exact(
        grid.double(),
        log_prior.exp(),
        (log_lik - log_lik.logsumexp(0) - log_step).exp(),
        (log_lik + log_prior - evidence).exp(),
        float(evidence),
    )


def step_of(grid: Tensor) -> Tensor:
    """Compute the distance of neighbours in an even grid."""
    return (grid[-1] - grid[0]).double() / (len(grid) - 1)


def gaussian_density(grid: Tensor, mean: float, std: float) -> Tensor:
    """Compute N(w | mean, std²) on a grid."""
    return torch.as_tensor(torch.distributions.Normal(mean, std).log_prob(grid).exp())


def only(values: dict[str, Tensor]) -> float:
    """Return the value of the only weight of a network."""
    (value,) = values.values()
    return float(value)
