"""Families fit correlations and several modes, which independent weights cannot."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim import families, likelihoods, priors
from oracles import gaussian_kl, linear_regression

NOISE, PRIOR_STD = 0.5, 1.5


def data(orthogonal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    X = (
        torch.linalg.qr(X)[0] * 2
        if orthogonal
        else X @ torch.tensor([[1.0, 0.9, 0], [0, 0.3, 0.9], [0, 0, 0.3]]).double()
    )
    return X, X @ torch.tensor([0.5, -1.0, 0.3]).double() + NOISE * torch.randn(12, generator=generator).double()


def regression(method: bl.Variational) -> bl.Bayesian:
    prior, likelihood = priors.Normal(PRIOR_STD), likelihoods.Gaussian(NOISE)
    model = nn.Linear(3, 1, bias=False).double()
    return bl.bayesianize(model, method, likelihood=likelihood, prior=prior, num_data=12)


def exact(orthogonal: bool = False) -> tuple[torch.Tensor, torch.Tensor, float]:
    mean, covariance, evidence = linear_regression(*data(orthogonal), NOISE, PRIOR_STD**-2)
    return mean, covariance, evidence.item()


def trained(bnn: bl.Bayesian, batch, steps: int, lr: float) -> bl.Bayesian:
    optimizer = bnn.optimizer(lr)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, 2 * (1 - step / steps))
        optimizer.zero_grad()
        bnn.loss(batch).backward()
        optimizer.step()
    return bnn


def test_the_bound_is_the_evidence_where_the_family_contains_the_posterior():
    """Then log p(D, w) − log q(w) is the same at every draw, and so is the bound of every order."""
    X, y = data()
    mean, covariance, evidence = exact()
    bnn = regression(bl.Variational(families.LowRankGaussian(3), renyi=0.5, samples=2))
    own = 0.5 * torch.linalg.eigvalsh(covariance)[0]
    bnn.model.weight.data.copy_(mean)
    bnn.model.weight_log_std.data.fill_(0.5 * math.log(own))
    root = torch.linalg.cholesky(covariance - own * torch.eye(3).double())
    bnn.model.weight_factor.data.copy_(root.T[:, None])
    for alpha in (1.0, 0.5, -math.inf):
        found = bl.log_evidence(bnn, [(X, y[:, None])], 3, renyi=alpha)
        assert found.value == pytest.approx(evidence, rel=1e-6)
    assert -12 * bnn.loss((X, y[:, None])).item() == pytest.approx(evidence, rel=1e-6)
    closed = bl.log_evidence(bnn, [(X, y[:, None])], 200)
    assert closed.is_bound
    assert abs(closed.value - evidence) < 4 * closed.std_error


def test_a_mixture_that_contains_the_posterior_gives_the_evidence():
    X, y = data(orthogonal=True)
    mean, covariance, evidence = exact(orthogonal=True)
    bnn = regression(bl.Variational(families.MixtureOfGaussians(2)))
    bnn.model.weight.data.copy_(mean)
    bnn.model.weight_offset.data.zero_()
    bnn.model.weight_log_std.data.copy_(0.5 * covariance.diagonal().log().expand(2, 1, 3))
    found = bl.log_evidence(bnn, [(X, y[:, None])], 3)
    assert found.value == pytest.approx(evidence, rel=1e-6)
    assert (found.kind, found.is_bound) == ("elbo", True)
    assert -12 * bnn.loss((X, y[:, None])).item() == pytest.approx(evidence, rel=1e-6)


def mean_field_gap() -> float:
    """The KL that independent weights cannot do without: their best variances are 1/Λᵢᵢ."""
    mean, covariance, _ = exact()
    return gaussian_kl(mean, torch.diag(1 / covariance.inverse().diagonal()), mean, covariance).item()


def test_training_at_full_rank_finds_the_posterior():
    X, y = data()
    mean, covariance, _ = exact()
    torch.manual_seed(0)
    method = bl.Variational(families.LowRankGaussian(3, initial_std=0.2), samples=4, antithetic=True)
    bnn = regression(method)
    bnn.model.weight.data.copy_(mean + 0.1)
    q = trained(bnn, (X, y[:, None]), steps=300, lr=0.05).posterior_
    U = q.factor["weight"].flatten(1)
    found = torch.diag(q.own_std["weight"].view(-1).square()) + U.T @ U
    gap = gaussian_kl(q.mean["weight"].view(-1), found, mean, covariance).item()
    assert mean_field_gap() > 0.5
    assert gap < 0.1 * mean_field_gap()


def test_a_mixture_comes_closer_to_a_correlated_posterior_than_independent_weights():
    X, y = data()
    mean, _, evidence = exact()
    torch.manual_seed(0)
    family = families.MixtureOfGaussians(3, initial_std=0.15, spread=0.3)
    bnn = regression(bl.Variational(family, samples=2, antithetic=True))
    bnn.model.weight.data.copy_(mean)
    trained(bnn, (X, y[:, None]), steps=150, lr=0.05)
    found = bl.log_evidence(bnn, [(X, y[:, None])], 200)
    assert evidence - mean_field_gap() + 0.15 < found.value < evidence + 4 * found.std_error


class Squared(nn.Module):
    """y = w² x: the sign of w cannot be told from data."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[0.2]]).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w.square()


def signless(family: families.Family) -> tuple[bl.Bayesian, tuple, float]:
    """A regression on y = w² x, trained, and its log evidence by quadrature."""
    torch.manual_seed(0)
    x = torch.linspace(0.5, 2, 10).double()[:, None]
    y = 1.2 * x + 0.3 * torch.randn(10, 1, generator=torch.Generator().manual_seed(2)).double()
    bnn = bl.bayesianize(
        Squared(), bl.Variational(family, samples=2, antithetic=True), likelihood=likelihoods.Gaussian(0.3), num_data=10
    )
    trained(bnn, (x, y), steps=200, lr=0.05)
    w = torch.linspace(-4, 4, 20_001).double()
    logs = torch.distributions.Normal(w.square()[:, None] * x[:, 0], 0.3).log_prob(y[:, 0]).sum(1)
    logs = logs - 0.5 * w.square() - 0.5 * math.log(2 * math.pi)
    return bnn, (x, y), (logs.logsumexp(0) + math.log(8 / 20_000)).item()


def test_a_mixture_finds_both_modes_and_independent_weights_one():
    """A unimodal q loses log 2 of the evidence, since it has half of the posterior."""
    bnn, batch, evidence = signless(families.DiagonalGaussian(0.1))
    one = bl.log_evidence(bnn, [batch], 100)
    assert evidence - one.value == pytest.approx(math.log(2), abs=0.1 + 4 * one.std_error)
    bnn, batch, evidence = signless(families.MixtureOfGaussians(2, initial_std=0.1, spread=5.0))
    two = bl.log_evidence(bnn, [batch], 100)
    assert evidence - two.value == pytest.approx(0, abs=0.1 + 4 * two.std_error)
    posterior = bnn.posterior_
    means = posterior.means["w"].flatten()
    assert means.prod() < 0
    assert posterior.weights.tolist() == pytest.approx([0.5, 0.5], abs=0.1)
    draws = posterior.sample(300, generator=torch.Generator().manual_seed(0))["w"]
    assert 0.35 < (draws > 0).double().mean() < 0.65
    # the mean network, in between, knows nothing; the mode and the average of draws do
    x = torch.ones(1, 1).double()
    assert bl.predict(bnn, x, how="mean").mean.item() < 0.4
    assert bl.predict(bnn, x, how="map").mean.item() == pytest.approx(1.2, abs=0.15)
    assert bl.predict(bnn, x, samples=64).mean.item() == pytest.approx(1.2, abs=0.15)
