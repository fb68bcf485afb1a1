"""A chain's own learning rate makes it the same chain in other units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl

SIGMA = 0.01


def samples(method: Any, sigma: float) -> Tensor:
    """Sample a linear regression whose targets, noise, prior and start are in units of sigma."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, dtype=torch.float64, generator=generator)
    y = x @ torch.tensor([[1.0], [-0.5], [0.2]], dtype=torch.float64)
    y = sigma * (y + torch.randn(y.shape, dtype=torch.float64, generator=generator))
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.3 * sigma)
    likelihood = bl.likelihoods.Gaussian(noise=sigma)
    bnn = bl.bayesianize(model, method, likelihood=likelihood, prior=bl.priors.Normal(sigma))
    bnn.fit(bl.data.Loader(x, y, batch_size=16), epochs=20, seed=1, progress=False)
    return bnn.posterior_.values["weight"]


@pytest.mark.parametrize(
    "method",
    [bl.SGLD(5), bl.SGHMC(5), bl.SGNHT(5), bl.SGHMC(5, adapt=True), bl.PSGLD(5)],
    ids=["sgld", "sghmc", "sgnht", "adaptive sghmc", "psgld"],
)
def test_a_chain_is_the_same_in_other_units(method: Any) -> None:
    usual, small = samples(method, 1.0), samples(method, SIGMA)
    torch.testing.assert_close(small / SIGMA, usual, rtol=0, atol=0.02)  # the floors of scales have no units
    assert usual.std(0).max() > 0.02  # it moves
