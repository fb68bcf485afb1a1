"""Priors: KL divergences against Monte Carlo, integrals and torch.distributions; which prior each parameter gets."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from torch import distributions, nn
from torch.distributions import kl_divergence

import bayeslim as bl
from bayeslim import priors
from bayeslim.errors import NoSiteMatched, ShapeMismatch
from bayeslim.io.registry import registered

PRIORS = {
    "number": priors.Normal(0.7),
    "shifted": priors.Normal(2.0, mean=0.5),
    "tensor std": priors.Normal(torch.tensor([0.3, 1.0, 2.5])),
    "tensor mean": priors.Normal(0.5, mean=torch.tensor([[-1.0], [2.0]])),
    "both": priors.Normal(torch.rand(2, 3) + 0.1, mean=torch.randn(2, 3)),
}
every_prior = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())


def a_posterior(dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(2, 3, generator=generator, dtype=dtype)
    return mean, 0.05 + torch.rand(2, 3, generator=generator, dtype=dtype)


def same(prior: priors.Normal, dtype=torch.float64) -> distributions.Normal:
    """The same prior over a parameter of shape (2, 3)."""
    std, mean = (torch.as_tensor(v, dtype=dtype).expand(2, 3) for v in (prior.std, prior.mean))
    return distributions.Normal(mean, std)


@every_prior
def test_kl_against_a_million_samples(prior):
    mean, std = a_posterior()
    q = distributions.Normal(mean, std)
    torch.manual_seed(0)
    draws = q.sample((1_000_000,))
    log_ratio = (q.log_prob(draws) - prior.log_prob(draws)).sum((1, 2))
    error = log_ratio.std() / 1000
    assert abs(prior.kl(mean, std) - log_ratio.mean()) < 4 * error
    assert error < 0.01 * log_ratio.mean()


@every_prior
def test_density_and_gradients_against_distributions(prior):
    mean, std = (t.requires_grad_() for t in a_posterior())
    expected = kl_divergence(distributions.Normal(mean, std), same(prior)).sum()
    assert torch.allclose(prior.kl(mean, std), expected)
    gradients = torch.autograd.grad(expected, [mean, std])
    for got, wanted in zip(torch.autograd.grad(prior.kl(mean, std), [mean, std]), gradients, strict=True):
        assert torch.allclose(got, wanted)
    weight = torch.randn(2, 3, dtype=torch.float64)
    assert torch.allclose(prior.log_prob(weight), same(prior).log_prob(weight))


@every_prior
@pytest.mark.parametrize("large", [10, 1 << 20])
def test_weights_and_their_kl_in_one_step(prior, large, monkeypatch):
    for module in (priors.base, priors.normal):
        monkeypatch.setattr(module, "MANY_WEIGHTS", large)
    (mean, std), squared = a_posterior(), [False, True, True]
    means = [(mean + 0.1 * k).requires_grad_() for k in range(3)]
    log_stds = [(std * (1 + k)).log().requires_grad_() for k in range(3)]

    def weights(*values):
        means, spreads, kl = prior.weights(values[:3], values[3:], squared)
        return *means, *spreads, kl

    *found, kl = weights(*means, *log_stds)
    assert all(torch.equal(a, b) for a, b in zip(found[:3], means, strict=True))
    for spread, log_std, square in zip(found[3:], log_stds, squared, strict=True):
        assert torch.allclose(spread, (log_std * (1 + square)).exp())
    assert torch.allclose(kl, sum(prior.kl(m, s.exp()) for m, s in zip(means, log_stds, strict=True)))
    # whatever is done with μ and σ, the KL's gradients join in
    assert torch.autograd.gradcheck(weights, (*means, *log_stds))
    assert torch.autograd.gradgradcheck(weights, (*means, *log_stds))


@every_prior
def test_gradient_of_the_kl_in_the_log_std(prior):
    """As it is trained: σ = e^s with both given, the gradient in s counted once."""
    mean, std = a_posterior()
    log_std = std.log().requires_grad_()
    (got,) = torch.autograd.grad(prior.kl(mean, log_std.exp(), log_std), [log_std])
    expected = kl_divergence(distributions.Normal(mean, log_std.exp()), same(prior)).sum()
    assert torch.allclose(got, torch.autograd.grad(expected, [log_std])[0])


@every_prior
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_of_the_weights_is_kept(prior, dtype):
    mean, std = a_posterior(dtype)
    assert prior.kl(mean, std).dtype == dtype
    assert prior.log_prob(mean).dtype == dtype


spread = st.floats(1e-3, 1e3)
centre = st.floats(-1e3, 1e3)


@settings(deadline=None)
@given(centre, spread, centre, spread)
def test_kl_is_not_negative(m, s, prior_mean, prior_std):
    mean, std = torch.tensor([m], dtype=torch.float64), torch.tensor([s], dtype=torch.float64)
    kl = priors.Normal(prior_std, prior_mean).kl(mean, std)
    assert kl >= -1e-9 * (1 + abs(kl))
    p = distributions.Normal(*torch.tensor([prior_mean, prior_std], dtype=torch.float64))
    expected = kl_divergence(distributions.Normal(mean, std), p).sum()
    assert kl.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(centre, spread, st.sampled_from([0.5, 0.9, 1.1, 2.0]), st.sampled_from([-1.0, 0.1, 1.0]))
def test_kl_is_zero_only_at_the_prior(m, s, factor, shift):
    one = torch.ones(1, dtype=torch.float64)
    prior = priors.Normal(s, m)
    assert prior.kl(m * one, s * one).item() == pytest.approx(0, abs=1e-9)
    assert prior.kl(m * one, s * factor * one) > 1e-3
    assert prior.kl((m + s * shift) * one, s * one) > 1e-3


def test_kl_of_many_weights_in_single_precision():
    mean, std = 0.03 * torch.randn(1000, 1000), 0.01 * torch.rand(1000, 1000) + 1e-3
    exact = priors.Normal(0.1).kl(mean.double(), std.double()).item()
    assert priors.Normal(0.1).kl(mean, std).item() == pytest.approx(exact, rel=1e-5)


class Student(priors.Prior):
    """A prior that knows its density alone."""

    name = "student"

    def log_prob(self, weight):
        return distributions.StudentT(3.0).log_prob(weight)


def integrated_kl(m: float, s: float) -> float:
    q, p = distributions.Normal(m, s), distributions.StudentT(3.0)

    def integrand(w):
        log_q = q.log_prob(torch.tensor(w)).item()
        return math.exp(log_q) * (log_q - p.log_prob(torch.tensor(w)).item())

    return integrate.quad(integrand, m - 10 * s, m + 10 * s, epsabs=1e-8)[0]


def test_monte_carlo_kl_is_unbiased_and_so_are_its_gradients():
    torch.manual_seed(0)
    n, m, s = 200_000, 0.8, 0.5
    mean = torch.full((n,), m, dtype=torch.float64, requires_grad=True)
    std = torch.full((n,), s, dtype=torch.float64, requires_grad=True)
    estimate = Student().kl(mean, std)  # the sum of n independent estimates
    by_mean, by_std = torch.autograd.grad(estimate, [mean, std])
    step = 1e-3
    slope_mean = (integrated_kl(m + step, s) - integrated_kl(m - step, s)) / (2 * step)
    slope_std = (integrated_kl(m, s + step) - integrated_kl(m, s - step)) / (2 * step)
    # a single estimate has a spread of about one, so n of them are within 5/√n
    assert estimate.item() / n == pytest.approx(integrated_kl(m, s), abs=5 / n**0.5)
    assert by_mean.mean().item() == pytest.approx(slope_mean, abs=5 / n**0.5)
    assert by_std.mean().item() == pytest.approx(slope_std, abs=10 / n**0.5)
    given_log = Student().kl(mean, std, std.log())
    assert given_log.item() / n == pytest.approx(integrated_kl(m, s), abs=5 / n**0.5)


def test_the_base_draws_anew_every_time():
    mean, std = torch.zeros(5), torch.ones(5)
    assert Student().kl(mean, std) != Student().kl(mean, std)


@every_prior
def test_samples(prior):
    draws = prior.sample((50_000, 2, 3), generator=torch.Generator().manual_seed(0)).double()
    p = same(prior)
    assert torch.allclose(draws.mean(0), p.mean, atol=5 * p.stddev.max().item() / 50_000**0.5)
    assert torch.allclose(draws.std(0), p.stddev, rtol=0.03)
    assert torch.equal(draws[0], prior.sample((50_000, 2, 3), generator=torch.Generator().manual_seed(0))[0].double())


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, torch.tensor([1.0, 0.0])])
def test_the_spread_must_be_positive(bad):
    with pytest.raises(ValueError, match="standard deviation and must be positive"):
        priors.Normal(bad)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()


def kl_of(prior, sites="weights") -> bl.Bayesian:
    likelihood = bl.likelihoods.Categorical()
    bnn = bl.bayesianize(network(), bl.Variational(), likelihood=likelihood, prior=prior, sites=sites, num_data=10)
    bnn.loss((torch.randn(5, 3).double(), torch.zeros(5, dtype=torch.long)))
    return bnn


SPECIFICATIONS = {
    "model": (priors.Normal(0.3), dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], 0.3)),
    "layer": (
        {"0": priors.Normal(0.3), "2": priors.Normal(3.0)},
        {"0.weight": 0.3, "0.bias": 0.3, "2.weight": 3.0, "2.bias": 3.0},
    ),
    "parameter, the first match counts": (
        {"0.weight": priors.Normal(0.3), re.compile(".*bias"): priors.Normal(2.0), "all": priors.Normal(1.0)},
        {"0.weight": 0.3, "0.bias": 2.0, "2.weight": 1.0, "2.bias": 2.0},
    ),
    "class": (
        {nn.Linear: priors.Normal(0.4)},
        dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], 0.4),
    ),
}


@pytest.mark.parametrize(("prior", "stds"), SPECIFICATIONS.values(), ids=SPECIFICATIONS.keys())
def test_priors_reach_their_parameters(prior, stds):
    bnn = kl_of(prior, sites="all")
    q = bnn.posterior_
    expected = sum(
        kl_divergence(distributions.Normal(q.mean[n], q.std[n]), distributions.Normal(0.0, std)).sum()
        for n, std in stds.items()
    )
    assert bnn.terms.kl.item() == pytest.approx(expected.item())


def test_a_tensor_prior_reaches_its_parameter():
    centre = network()[0].weight.detach()
    bnn = kl_of({"0.weight": priors.Normal(0.01, mean=centre), "2.weight": priors.Normal(0.01)})
    q = bnn.posterior_
    second = kl_divergence(distributions.Normal(q.mean["2.weight"], 0.01), distributions.Normal(0.0, 0.01)).sum()
    assert bnn.terms.kl.item() == pytest.approx(second.item())


def test_a_tensor_that_does_not_broadcast_to_its_parameter_is_refused():
    for shape in [(5,), (4, 4), (2, 1, 1)]:
        with pytest.raises(ShapeMismatch, match=r"0\.weight"):
            kl_of({"0.weight": priors.Normal(torch.ones(shape)), "all": priors.Normal(1.0)})
    kl_of({"0.weight": priors.Normal(torch.ones(4, 1)), "all": priors.Normal(1.0)})


def test_every_random_parameter_needs_a_prior():
    with pytest.raises(NoSiteMatched, match=r'"2\.weight"'):
        kl_of({"0": priors.Normal(1.0)})
    for bad in (1.0, priors.Normal, {"all": 1.0}, None.__class__):
        with pytest.raises(TypeError, match="prior must be"):
            kl_of(bad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kl_of_half_precision_weights_is_summed_in_single(dtype):
    model = nn.Linear(600, 500, bias=False).to(dtype)
    nn.init.normal_(model.weight, std=2.0)
    likelihood = bl.likelihoods.Gaussian(1.0)
    bnn = bl.bayesianize(model, bl.Variational(estimator="shared"), likelihood=likelihood, num_data=10)
    bnn.loss((torch.randn(2, 600).to(dtype), torch.zeros(2, 500)))
    q = bnn.posterior_
    exact = priors.Normal(1.0).kl(q.mean["weight"].double(), q.std["weight"].double()).item()
    assert bnn.terms.kl.item() == pytest.approx(exact, rel=1e-5)


def test_config_builds_it_again():
    prior = priors.Normal(0.3, mean=1.0)
    assert registered("prior", prior.name)(**prior.config()) == prior
