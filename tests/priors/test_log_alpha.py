"""Divergences that are functions of α alone: fits and bounds for the log-uniform prior, relevance determination."""

from __future__ import annotations

import itertools
import math

import integrals
import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special
from torch import nn

import bayeslim as bl
from bayeslim import families, likelihoods, priors
from bayeslim.errors import ImproperPrior, UnsupportedModel

LOG_ALPHA = np.linspace(-20, 20, 81)
EXACT = priors.LogUniform()
CURVES = {
    "approximate": priors.LogUniform("approximate"),
    "polynomial": priors.LogUniform("polynomial"),
    "lower": priors.LogUniform("lower"),
    "upper": priors.LogUniform("upper"),
    "relevance": priors.RelevanceDetermination(),
}
every_curve = pytest.mark.parametrize("prior", CURVES.values(), ids=CURVES.keys())
LIMIT = 0.5 * (np.euler_gamma + math.log(2))


def kl(prior: priors.Prior, log_alpha, mean: float = 0.7, dtype: torch.dtype = torch.float64) -> np.ndarray:
    """The divergence at every log α."""
    log_std = torch.as_tensor(log_alpha / 2 + math.log(abs(mean)), dtype=dtype)
    each = [prior.kl(torch.tensor([mean], dtype=dtype), s.exp(), s) for s in log_std.split(1)]
    return torch.stack(each).double().numpy()


@pytest.fixture(scope="module")
def truth() -> np.ndarray:
    """KL(N(μ, σ²) ‖ log-uniform) at every log α, by integration over w."""
    return np.array([integrals.kl(EXACT, 0.7, 0.7 * math.exp(a / 2)) for a in LOG_ALPHA])


def test_the_integral_over_weights_is_that_of_dawsons_function(truth):
    """Two independent ways to the same truth, and the closed form."""
    by_dawson = [2 * integrate.quad(special.dawsn, 0, math.exp(-a / 2) / 2**0.5, limit=500)[0] for a in LOG_ALPHA[24:]]
    assert truth[24:].tolist() == pytest.approx(by_dawson, abs=1e-8)
    assert kl(EXACT, LOG_ALPHA).tolist() == pytest.approx(truth.tolist(), abs=1e-8)


def test_the_published_fit(truth):
    found = kl(CURVES["approximate"], LOG_ALPHA)
    written = 0.63576 - (0.63576 * special.expit(1.87320 + 1.48695 * LOG_ALPHA) - 0.5 * np.log1p(np.exp(-LOG_ALPHA)))
    assert found.tolist() == pytest.approx(written.tolist(), abs=1e-12)
    assert 0.005 < np.abs(found - truth).max() < 0.01


def test_the_polynomial_for_alpha_up_to_one(truth):
    found, below = kl(CURVES["polynomial"], LOG_ALPHA), LOG_ALPHA <= 0
    alpha = np.exp(LOG_ALPHA[below])
    written = 0.5 * np.log(alpha) + 1.16145124 * alpha - 1.50204118 * alpha**2 + 0.58629921 * alpha**3
    assert found[below].tolist() == pytest.approx((LIMIT - written).tolist(), abs=1e-12)
    assert 0.03 < np.abs(found - truth)[below].max() < 0.05
    assert (found[~below] == found[below][-1]).all()


def test_bounds_hold_at_every_alpha_and_are_tight_at_the_ends(truth):
    lower, upper = kl(CURVES["lower"], LOG_ALPHA), kl(CURVES["upper"], LOG_ALPHA)
    rounding = 1e-8
    assert (lower <= truth + rounding).all()
    assert (truth <= upper + rounding).all()
    gap = truth - lower
    assert (np.diff(gap) <= rounding).all()
    assert gap[[0, -1]].tolist() == pytest.approx([LIMIT, 0], abs=1e-6)
    assert (upper - lower).tolist() == pytest.approx([LIMIT] * len(gap))


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.3), (0.8, 0.5), (-2.0, 0.05), (0.01, 2.0), (3.0, 1e-4)])
def test_relevance_determination_is_the_best_normal_prior(mean, std):
    """Against a search for the scale, with the divergence of every candidate by integration."""
    best = optimize.minimize_scalar(
        lambda log_scale: integrals.kl(priors.Normal(math.exp(log_scale)), mean, std),
        bounds=(math.log(std) - 1, math.log(abs(mean) + std) + 1),
        method="bounded",
        options={"xatol": 1e-9},
    )
    m, s = torch.tensor([mean], dtype=torch.float64), torch.tensor([std], dtype=torch.float64)
    found = CURVES["relevance"].kl(m, s).item()
    assert math.exp(best.x) == pytest.approx(math.hypot(mean, std), rel=1e-4)
    assert found == pytest.approx(best.fun, abs=1e-7)
    assert found == pytest.approx(priors.Normal((m.square() + s.square()).sqrt()).kl(m, s).item(), abs=1e-7)
    assert found == pytest.approx(0.5 * math.log1p((mean / std) ** 2), abs=1e-12)


def test_relevance_determination_is_the_lower_bound_of_log_uniform():
    assert kl(CURVES["relevance"], LOG_ALPHA).tolist() == kl(CURVES["lower"], LOG_ALPHA).tolist()


@every_curve
def test_derivatives(prior):
    """The first and the second, against finite differences; away from α = 1, where the polynomial has a corner."""
    log_alpha = torch.tensor([-9.0, -4.0, -1.5, -0.3, 0.4, 2.0, 7.0]).double()
    mean = torch.tensor([0.5, -2.0, 0.1, 1.0, -0.7, 0.3, 3.0]).double()
    values = mean.requires_grad_(), (log_alpha / 2 + mean.abs().log()).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda m, s: prior.kl(m, s.exp(), s), values)
    assert torch.autograd.gradgradcheck(lambda m, s: prior.kl(m, s.exp(), s), values)


def test_gradients_of_relevance_determination_are_those_of_its_formula():
    mean = torch.randn(200, dtype=torch.float64).requires_grad_()
    std = (torch.randn(200, dtype=torch.float64).exp()).requires_grad_()
    by_mean, by_std = torch.autograd.grad(CURVES["relevance"].kl(mean, std), [mean, std])
    squares = mean.square() + std.square()
    torch.testing.assert_close(by_mean, mean / squares)
    torch.testing.assert_close(by_std, std / squares - 1 / std)


@every_curve
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_is_finite_whatever_the_sizes(prior, dtype):
    means = [0.0, -0.0, 1e-38, -1e-30, 1e-20, 1.0, 1e20, -1e38]
    for at in itertools.product(means, [-300.0, -87.0, -46.05, 0.0, 46.05, 80.0]):
        m, s = (torch.tensor([v], dtype=dtype, requires_grad=True) for v in at)
        found = prior.kl(m, s.exp(), s)
        by_mean, by_log_std = torch.autograd.grad(found, [m, s])
        assert torch.isfinite(found), at
        assert torch.isfinite(by_mean).all(), at
        assert torch.isfinite(by_log_std).all(), at
        assert found >= 0, at
        assert by_mean.item() * at[0] >= 0, at  # towards zero
        assert -1.3 < by_log_std.item() <= 0, at  # towards more noise


@every_curve
def test_single_precision_is_as_good_as_it_can_be(prior):
    """|μ|/σ over forty orders of magnitude."""
    for ratio, scale in itertools.product([1e-20, 1e-10, 1e-3, 1.0, 1e3, 1e10, 1e20], [1e-12, 1.0, 1e12]):
        found = []
        for dtype in (torch.float32, torch.float64):
            mean = torch.tensor([ratio * scale], dtype=dtype, requires_grad=True)
            log_std = torch.tensor([math.log(scale)], dtype=dtype, requires_grad=True)
            value = prior.kl(mean, log_std.exp(), log_std)
            by_mean, by_log_std = torch.autograd.grad(value, [mean, log_std])
            found.append((value.item(), by_mean.item() * scale, by_log_std.item()))
        single, double = found
        assert single == pytest.approx(double, rel=1e-4, abs=1e-15), (ratio, scale)


LIMITS = {"approximate": (0.63576, 0), "polynomial": (LIMIT, None), "lower": (0, 0), "upper": (LIMIT, LIMIT)}


@pytest.mark.parametrize(("name", "limits"), LIMITS.items())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits(name, limits, dtype):
    above, end = limits
    value = kl(CURVES[name], np.array([-120.0, 120.0]), dtype=dtype)
    assert value[0] == pytest.approx(60 + above, rel=1e-6)
    if end is not None:
        assert value[1] == pytest.approx(end, abs=1e-7)


@every_curve
def test_is_a_function_of_alpha_alone_and_a_sum(prior):
    std, mean = torch.rand(50, dtype=torch.float64) + 0.1, torch.randn(50, dtype=torch.float64)
    whole = prior.kl(mean, std).item()
    assert prior.kl(-1e-3 * mean, 1e-3 * std).item() == pytest.approx(whole, rel=1e-12)
    assert sum(prior.kl(m, s).item() for m, s in zip(mean.split(1), std.split(1), strict=True)) == pytest.approx(whole)


@every_curve
def test_falls_with_alpha(prior):
    assert (np.diff(kl(prior, np.linspace(-40, 40, 301))) <= 0).all()


def network(prior: priors.Prior, method: bl.Method | None = None, model: nn.Module | None = None) -> bl.Bayesian:
    model, method = model or nn.Linear(3, 2), method or bl.Variational()
    return bl.bayesianize(model, method, likelihood=likelihoods.Categorical(), prior=prior, num_data=10, sites="all")


BATCH = (torch.randn(4, 3), torch.zeros(4, dtype=torch.long))


@every_curve
def test_not_a_number_is_reported_as_such(prior):
    bnn = network(prior)
    bnn.model.weight.data[0, 0] = math.nan
    assert bnn.loss(BATCH).isnan()


@every_curve
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trains_with_finite_weights_from_zero(prior, dtype):
    bnn = network(prior, model=nn.Linear(3, 2).to(dtype))
    nn.init.zeros_(bnn.model.bias)
    x, y = torch.randn(20, 3, dtype=dtype), torch.arange(20) % 2
    optimizer = bnn.optimizer(0.05)
    for _ in range(30):
        optimizer.zero_grad()
        bnn.loss((x, y)).backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in bnn.parameters())
    assert bnn.terms.kl.dtype == torch.float32
    assert torch.isfinite(bnn.terms.kl)


@every_curve
def test_is_saved_and_loaded(prior, tmp_path):
    bl.save(network(prior), tmp_path / "bnn")
    assert bl.load(tmp_path / "bnn", model=nn.Linear(3, 2)).priors["weight"] == prior


# Dynamo makes an object of every autograd function that it traces, and warns of that itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@every_curve
def test_is_compiled_whole(prior):
    torch._dynamo.reset()
    values = [torch.randn(7, requires_grad=True) for _ in range(2)]
    found = []
    for kl_of in (prior.kl, torch.compile(prior.kl, backend="aot_eager", fullgraph=True)):
        value = kl_of(values[0], values[1].exp(), values[1])
        found.append((value, *torch.autograd.grad(value, values)))
    torch.testing.assert_close(*found)


def test_relevance_determination_has_no_evidence_draws_or_density():
    prior = CURVES["relevance"]
    with pytest.raises(ImproperPrior, match="RelevanceDetermination"):
        bl.log_evidence(network(prior), [BATCH])
    with pytest.raises(ImproperPrior, match="no draws"):
        prior.sample((2,))
    with pytest.raises(ImproperPrior, match=r"Gaussian family at renyi=1"):
        network(prior, bl.Variational(families.MixtureOfGaussians(2))).loss(BATCH)
    with pytest.raises(ImproperPrior, match="log_alpha"):
        bl.plan(network(prior), bl.Budget(sparsity=0.5), criterion="savage_dickey")
    with pytest.raises(UnsupportedModel, match=r"needs a Normal prior.*RelevanceDetermination"):
        network(prior, bl.Laplace())


def test_relevance_determination_of_correlated_weights_takes_their_marginals():
    bnn = network(CURVES["relevance"], bl.Variational(families.LowRankGaussian(2, initial_std=0.3)))
    bnn.loss(BATCH)
    q = bnn.posterior_
    best = {n: priors.Normal((q.mean[n].square() + q.variance[n]).sqrt()) for n in q.names}
    density = bnn.method.family.density(bnn.model, bnn.sites.names, {})
    assert bnn.terms.kl.item() == pytest.approx(density.kl(best).item(), rel=1e-5)


def test_relevance_determination_takes_away_what_the_data_do_not_need():
    """Two inputs of which one says all: only the weight of the other one drowns in its noise."""
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    y = 2 * x[:, :1] + 0.1 * torch.randn(200, 1)
    method = bl.Variational(families.DiagonalGaussian(0.05))
    bnn = bl.bayesianize(
        nn.Linear(2, 1, bias=False),
        method,
        likelihood=likelihoods.Gaussian(0.1),
        prior=CURVES["relevance"],
        num_data=200,
    )
    bnn.fit([(x, y)], epochs=800, lr=0.02)
    q = bnn.posterior_
    log_alpha = (q.variance["weight"] / q.mean["weight"].square()).log().view(-1)
    assert log_alpha[0] < -8
    assert log_alpha[1] > 0


@pytest.mark.parametrize("name", ["exakt", None, 1, True])
def test_unknown_divergences_are_refused(name):
    with pytest.raises(ValueError, match='must be one of "exact", "approximate", "polynomial", "lower", "upper"'):
        priors.LogUniform(name)
