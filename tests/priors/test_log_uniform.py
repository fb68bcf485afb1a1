"""The log-uniform prior's divergence over the whole range of α, against integrals, series and Dawson's function."""

from __future__ import annotations

import itertools
import math

import integrals
import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import nn

import bayeslim as bl
from bayeslim import priors
from bayeslim.errors import ImproperPrior, UnsupportedModel

PRIOR = priors.LogUniform()
LOG_ALPHA = np.concatenate([np.linspace(-12, 12, 49), [-6.238325, -6.2383, 1e-9]])


def found(log_alpha, dtype=torch.float64, mean=0.7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The divergence of every α by itself, and its gradients in μ and log σ."""
    mean = torch.full((len(log_alpha),), mean, dtype=dtype, requires_grad=True)
    log_std = (torch.as_tensor(log_alpha / 2) + mean.detach().abs().double().log()).to(dtype).requires_grad_()
    each = torch.stack([PRIOR.kl(m, s.exp(), s) for m, s in zip(mean.split(1), log_std.split(1), strict=True)])
    return each.detach(), *torch.autograd.grad(each.sum(), [mean, log_std])


def test_against_numerical_integration():
    wanted = [integrals.kl(PRIOR, 0.7, 0.7 * math.exp(a / 2)) for a in LOG_ALPHA]
    assert found(LOG_ALPHA)[0].tolist() == pytest.approx(wanted, abs=1e-8)


def test_against_the_series_in_poisson_weights():
    for log_alpha in (-8.0, -5.0, -2.0, 0.0, 3.0, 10.0):
        x, k = 0.5 * math.exp(-log_alpha), np.arange(20_000)
        terms = stats.poisson(x).pmf(k) * (special.digamma(k + 0.5) - special.digamma(0.5))
        (value, _, _) = found(np.array([log_alpha]))
        assert value.item() == pytest.approx(0.5 * terms.sum(), rel=1e-9)


def test_gradients_are_those_of_dawsons_function():
    _, by_mean, by_log_std = found(LOG_ALPHA)
    u = np.exp(-LOG_ALPHA / 2) / math.sqrt(2)
    wanted = 2 * u * special.dawsn(u)
    assert (-by_log_std).tolist() == pytest.approx(wanted.tolist(), rel=1e-11)
    assert (by_mean * 0.7).tolist() == pytest.approx(wanted.tolist(), rel=1e-11)


def test_first_and_second_derivatives():
    values = tuple(torch.randn(12, dtype=torch.float64).requires_grad_() for _ in range(2))
    values[0].data[:3] *= 1e3
    assert torch.autograd.gradcheck(lambda m, s: PRIOR.kl(m, s.exp(), s), values)
    assert torch.autograd.gradgradcheck(lambda m, s: PRIOR.kl(m, s.exp(), s), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits(dtype):
    ends = 120.0 if dtype == torch.float32 else 600.0
    value, by_mean, by_log_std = found(np.array([-ends, ends]), dtype)
    # α → 0: log |μ|/σ and a constant; α → ∞: nothing
    constant = 0.5 * (np.euler_gamma + math.log(2))
    assert value[0].item() == pytest.approx(ends / 2 + constant, rel=1e-6)
    assert (by_mean[0].item(), by_log_std[0].item()) == pytest.approx((1 / 0.7, -1.0), rel=1e-6)
    assert (value[1].item(), by_mean[1].item(), by_log_std[1].item()) == pytest.approx((0, 0, 0), abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_is_finite_whatever_the_sizes(dtype):
    means = [0.0, -0.0, 1e-38, -1e-30, 1.0, 1e30, -1e38]
    for at in itertools.product(means, [-300.0, -87.0, -40.0, 0.0, 40.0]):
        m, s = (torch.tensor([v], dtype=dtype, requires_grad=True) for v in at)
        kl = PRIOR.kl(m, s.exp(), s)
        gradients = torch.autograd.grad(kl, [m, s])
        assert torch.isfinite(kl), at
        assert all(torch.isfinite(g).all() for g in gradients), at
        assert gradients[0].item() * at[0] >= 0, at  # towards zero
        assert gradients[1].item() <= 0, at  # towards more noise


def test_single_precision_is_as_good_as_it_can_be():
    exact, single = found(LOG_ALPHA), found(LOG_ALPHA, torch.float32)
    for wanted, got in zip(exact, single, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=1e-7)


def test_falls_with_alpha_and_is_never_negative():
    value, _, _ = found(np.linspace(-40, 40, 301))
    assert (value.diff() <= 0).all()
    assert (value >= 0).all()


def test_is_a_function_of_alpha_alone_and_a_sum():
    std = torch.rand(50, dtype=torch.float64) + 0.1
    mean = torch.randn(50, dtype=torch.float64)
    whole = PRIOR.kl(mean, std).item()
    assert PRIOR.kl(-1e-3 * mean, 1e-3 * std).item() == pytest.approx(whole, rel=1e-12)
    assert sum(PRIOR.kl(m, s).item() for m, s in zip(mean.split(1), std.split(1), strict=True)) == pytest.approx(whole)


def test_the_density_has_the_constant_of_the_divergence():
    """So that estimates of the KL, as other families need them, agree with the closed form."""
    mean, std = torch.full((200_000,), 0.5, dtype=torch.float64), torch.full((200_000,), 0.8, dtype=torch.float64)
    estimate = priors.Prior.kl(PRIOR, mean, std).item() / len(mean)
    assert estimate == pytest.approx(PRIOR.kl(mean, std).item() / len(mean), abs=0.01)


def network(**options) -> bl.Bayesian:
    model, likelihood = nn.Linear(3, 2), bl.likelihoods.Categorical()
    return bl.bayesianize(model, bl.Variational(), likelihood=likelihood, prior=PRIOR, num_data=10, **options)


def test_not_a_number_is_reported_as_such():
    bnn = network()
    bnn.model.weight.data[0, 0] = math.nan
    assert bnn.loss((torch.randn(4, 3), torch.zeros(4, dtype=torch.long))).isnan()


def test_trains_with_finite_weights_from_zero():
    bnn = network(sites="all")
    nn.init.zeros_(bnn.model.bias)
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    optimizer = bnn.optimizer(0.05)
    for _ in range(50):
        optimizer.zero_grad()
        bnn.loss((x, y)).backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in bnn.parameters())
    assert torch.isfinite(bnn.terms.kl)


def test_has_no_evidence_and_no_laplace_approximation():
    with pytest.raises(ImproperPrior, match="LogUniform does not integrate to one"):
        bl.log_evidence(network(), [(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))])
    with pytest.raises(UnsupportedModel, match=r"needs a Normal prior.*LogUniform"):
        bl.bayesianize(nn.Linear(3, 2), bl.Laplace(), likelihood=bl.likelihoods.Categorical(), prior=PRIOR)
