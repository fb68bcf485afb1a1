"""Networks with given Gaussian weights, and their outputs by brute force."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import bayeslim as bl
from bayeslim import likelihoods
from bayeslim.predict.moments.network import moments


def bayesian(model: nn.Module, std: float = 0.3, likelihood=None, sites=None) -> bl.Bayesian:
    """A double-precision network whose random weights have spreads around `std`."""
    generator = torch.Generator().manual_seed(1)
    bnn = bl.bayesianize(
        model.double(), bl.Variational(), likelihood=likelihood or likelihoods.Gaussian(), sites=sites, num_data=10
    )
    with torch.no_grad():
        for name in bnn.sites.names:
            spreads = std * (0.5 + torch.rand(bnn.model.get_parameter(name).shape, generator=generator))
            bnn.method.family.log_std(bnn.model, name).copy_(spreads.log())
    return bnn.eval()


def carried(bnn: bl.Bayesian, x: Tensor):
    """Compute the settled moments of the outputs."""
    with torch.no_grad():
        return moments(bnn.model, bnn.posterior_, x).settled()


def drawn(bnn: bl.Bayesian, x: Tensor, count: int = 100_000, seed: int = 0) -> Tensor:
    """Draw networks from the posterior and return their outputs, (count, ...)."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    with torch.no_grad():
        for _ in range(4):
            params = bnn.posterior_.sample(count // 4, generator=generator)
            parts.append(vmap(lambda p: functional_call(bnn.model, p, (x,)), randomness="error")(params))
    return torch.cat(parts)


def assert_agree(ours, draws: Tensor, variance_within: float = 0.03) -> None:
    """Means within five standard errors, variances within a few per cent."""
    error = 5 * draws.std(0) / len(draws) ** 0.5 + 1e-12
    assert ((ours.mu - draws.mean(0)).abs() < error).all()
    spread = draws.var(0)
    # the variance of what hardly ever happens is not known to a few per cent
    assert torch.allclose(ours.sigma2, spread, rtol=variance_within, atol=3e-3 * spread.max().item())
