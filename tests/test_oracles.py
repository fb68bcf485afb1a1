"""The oracles agree with each other, by different roads."""

import torch
from torch import nn

import oracles
from bayeslim.likelihoods import Categorical, Gaussian


def test_linear_regression_is_the_same_from_the_hessian():
    model = nn.Linear(3, 1, bias=False).double()
    X, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    mean, covariance, evidence = oracles.linear_regression(X, y, 0.4, 2.0)
    likelihood = Gaussian(0.4).double()
    batch = [(X, y.unsqueeze(1))]
    H = oracles.hessian(model, batch, likelihood)
    torch.testing.assert_close(H, oracles.ggn(model, batch, likelihood))
    torch.testing.assert_close(torch.linalg.inv(H + 2 * torch.eye(3)), covariance)
    model.weight.data = mean.unsqueeze(0)
    slope = oracles.example_gradients(model, batch, likelihood).sum(0) + 2 * mean
    torch.testing.assert_close(slope, torch.zeros_like(slope))
    # log p(y) = log p(y|w) + log p(w) − log p(w|y) at any w, here the mean
    prior = torch.distributions.Normal(0, 2**-0.5).log_prob(mean).sum()
    posterior = torch.distributions.MultivariateNormal(mean, covariance).log_prob(mean)
    torch.testing.assert_close(likelihood.log_prob(model(X), batch[0][1]).sum() + prior - posterior, evidence)


def test_jacobian_by_differences():
    model, x = (
        nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double(),
        torch.randn(4, 2, dtype=torch.float64),
    )
    names = oracles.parameter_names(model)
    start = oracles.flat(dict(model.named_parameters()), names).detach()
    f = oracles.outputs_of(model, names, x)
    step = 1e-6 * torch.eye(len(start), dtype=torch.float64)
    differences = torch.stack([(f(start + s) - f(start - s)) / 2e-6 for s in step], -1)
    torch.testing.assert_close(oracles.jacobian(model, x), differences, rtol=1e-6, atol=1e-8)


def test_output_hessian_of_classes():
    f = torch.randn(3, 4, dtype=torch.float64)
    p = f.softmax(-1)
    expected = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    torch.testing.assert_close(oracles.output_hessian(Categorical(), f, torch.tensor([0, 1, 2])), expected)
