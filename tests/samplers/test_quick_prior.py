"""The prior of samplers is `bnn.log_prior()`, value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.methods.quick_prior import log_prior
from bayeslim.priors import Laplace, Normal

PRIORS = {
    "one": Normal(0.7),
    "two": {"0": Normal(2.0, mean=0.5), "all": Normal(0.3)},
    "tensor": Normal(torch.tensor(0.5)),
    "another": {"0": Laplace(1.0), "all": Normal(0.3)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", PRIORS)
def test_value_and_gradient(kind, dtype):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    bnn = bl.bayesianize(model, bl.SGLD(), likelihood=bl.likelihoods.Categorical(), prior=PRIORS[kind], num_data=9)
    values, gradients = [], []
    for prior in (log_prior(bnn), bnn.log_prior()):
        values.append(prior.detach())
        gradients.append(torch.autograd.grad(2.5 * prior, list(bnn.model.parameters())))
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients)


def test_the_loss_is_the_negative_log_posterior():
    model = nn.Linear(5, 3)
    bnn = bl.bayesianize(model, bl.SGLD(), likelihood=bl.likelihoods.Categorical(), num_data=9)
    x, y = torch.randn(4, 5), torch.arange(4) % 3
    expected = nn.functional.cross_entropy(bnn.model(x), y) - bnn.log_prior() / 9
    torch.testing.assert_close(bnn.loss((x, y)), expected)
