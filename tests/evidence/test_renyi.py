"""Rényi bounds against the closed forms of Gaussians, and the training loss against the bound of its own draws.

The target is N(0, [[1, ρ], [ρ, 1]]) and q = N(0, t I). In the orthogonal directions of the target everything has closed
forms: L_α itself, and the t that is stationary, t = ((1 − 2α) + √(1 − 4α(1 − α)ρ²)) / (2(1 − α)).
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions, nn

import bayeslim as bl
from bayeslim import families, likelihoods, priors
from bayeslim.evidence import renyi
from bayeslim.families.base import log_prior
from oracles import linear_regression

INF = math.inf
RHO = 0.8
ORDERS = (INF, 8.0, 2.0, 1.0, 0.5, 0.1, 0.0, -0.5, -2.0, -8.0, -INF)


def stationary(alpha: float) -> float:
    """The variance of the best q."""
    if math.isinf(alpha):
        return 1 - math.copysign(RHO, alpha)
    if alpha == 1:
        return 1 - RHO**2
    return ((1 - 2 * alpha) + math.sqrt(1 - 4 * alpha * (1 - alpha) * RHO**2)) / (2 * (1 - alpha))


def divergence(alpha: float, t: torch.Tensor) -> torch.Tensor:
    """D_α(q ‖ target), from ∫ q^α p^(1−α) in each of the target's directions."""
    total = torch.zeros((), dtype=torch.float64)
    for scale in (1 + RHO, 1 - RHO):
        if alpha == 1:
            total = total + 0.5 * (t / scale - 1 - (t / scale).log())
        else:
            precision = alpha / t + (1 - alpha) / scale
            log_integral = -0.5 * (alpha * t.log() + (1 - alpha) * math.log(scale) + precision.log())
            total = total + log_integral / (alpha - 1)
    return total


def log_weights(t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """log p(w) − log q(w) of draws √t ε, (..., 2), in the target's directions; its evidence is one."""
    scale = torch.tensor([1 + RHO, 1 - RHO]).double()
    draws = t.sqrt() * noise
    return (
        distributions.Normal(0, scale.sqrt()).log_prob(draws) - distributions.Normal(0, t.sqrt()).log_prob(draws)
    ).sum(-1)


def test_the_closed_forms_agree():
    for alpha in (8.0, 2.0, 1.0, 0.5, 0.1, -0.5, -2.0, -8.0):
        t = torch.tensor(stationary(alpha), dtype=torch.float64, requires_grad=True)
        value = divergence(alpha, t)
        (slope,) = torch.autograd.grad(value, t)
        assert abs(slope.item()) < 1e-9
        # above zero it is the smallest divergence; below, the divergence is negative and this the smallest upper bound
        side = 1 if alpha > 0 else -1
        for factor in (0.95, 1.05):
            assert side * (divergence(alpha, factor * t) - value).item() > 0
        assert side * value.item() > 0


def test_fits_widen_as_the_order_falls_from_within_to_around_the_target():
    variances = [stationary(alpha) for alpha in ORDERS]
    assert all(narrow < wide - 1e-3 for narrow, wide in itertools.pairwise(variances))
    assert variances[0] == pytest.approx(1 - RHO)
    assert variances[-1] == pytest.approx(1 + RHO)
    assert stationary(1e7) == pytest.approx(1 - RHO, rel=1e-5)
    assert stationary(-1e7) == pytest.approx(1 + RHO, rel=1e-5)
    assert stationary(1e-9) == pytest.approx(1.0)  # the target's own marginals


@pytest.mark.parametrize("alpha", [4.0, 2.0, 1.0, 0.5, 0.25, -0.5])
def test_optimising_the_estimate_finds_the_closed_form_optimum(alpha):
    noise = torch.randn(20_000, 2, generator=torch.Generator().manual_seed(1)).double()
    noise = torch.cat([noise, -noise])
    log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_t], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        # the upper bounds of α < 0 are minimised
        value = math.copysign(1, -alpha) * renyi.bound(log_weights(log_t.exp(), noise), alpha)
        value.backward()
        return value

    optimizer.step(loss)
    assert log_t.exp().item() == pytest.approx(stationary(alpha), rel=0.1)


def test_maximising_below_zero_depends_on_the_number_of_draws():
    """Few draws miss the tails in which the upper bound is large, so the fit is wide; with many it collapses."""
    found = []
    for draws in (4, 4000):
        noise = torch.randn(max(1, 4000 // draws), draws, 2, generator=torch.Generator().manual_seed(1)).double()
        grid = torch.linspace(0.05, 3, 60).double()
        values = torch.stack([renyi.bound(log_weights(t, noise).T, -2.0).mean() for t in grid])
        found.append(grid[values.argmax()].item())
    assert found[1] < 0.5 * found[0]


@pytest.mark.parametrize(("alpha", "t"), [(3.0, 0.2), (0.5, 0.8), (0.0, 0.8), (-1.0, 1.6)])
def test_estimates_approach_the_exact_value_from_one_side(alpha, t):
    t = torch.tensor(t).double()
    exact = -divergence(alpha, t).item()
    noise = torch.randn(40_000, 2, generator=torch.Generator().manual_seed(2)).double()
    logs = log_weights(t, noise)
    means, errors = [], []
    for draws in (1, 4, 16, 200):
        estimates = renyi.bound(logs.view(-1, draws).T, alpha)
        means.append(estimates.mean().item())
        errors.append(estimates.std().item() / len(estimates) ** 0.5)
    side = 1 if alpha < 1 else -1
    elbo = -divergence(1.0, t).item()
    assert abs(means[0] - elbo) < 4 * errors[0]  # one draw is the ELBO whatever the order
    assert all(side * (b - a) > 0 for a, b in itertools.pairwise(means))
    assert all(side * (exact - m) > -4 * e for m, e in zip(means, errors, strict=True))
    assert abs(means[-1] - exact) < 0.2 * abs(elbo - exact) + 4 * errors[-1]


def test_the_bound_is_a_lower_bound_where_it_says_so():
    t = torch.tensor(0.5).double()
    logs = log_weights(t, torch.randn(8, 50_000, 2, generator=torch.Generator().manual_seed(3)).double())
    for alpha in ORDERS:
        if renyi.is_lower_bound(alpha):
            assert renyi.bound(logs, alpha).mean().item() < 0
    wide = log_weights(torch.tensor(2.5).double(), torch.randn(64, 5000, 2).double())
    assert renyi.bound(wide, -INF).mean().item() > 0.5
    assert not renyi.is_lower_bound(-INF)
    assert not renyi.is_lower_bound(-1e-3)


numbers = st.lists(st.floats(-500, 500), min_size=1, max_size=6)


@given(numbers, st.floats(-20, 20), st.floats(0, 20), st.floats(-1e4, 1e4))
@settings(max_examples=40, deadline=None)
def test_falls_in_the_order_stays_between_the_extremes_and_moves_with_its_weights(values, alpha, more, shift):
    logs = torch.tensor(values, dtype=torch.float64)
    low, high = renyi.bound(logs, alpha + more).item(), renyi.bound(logs, alpha).item()
    assert low <= high + 1e-9
    assert logs.min() - 1e-9 <= low
    assert high <= logs.max() + 1e-9
    assert renyi.bound(logs + shift, alpha).item() == pytest.approx(high + shift, abs=1e-7)


def test_orders_next_to_the_limits_are_next_to_the_limits():
    logs = torch.tensor([-1e5, -1e5 + 3, -1e5 + 7])
    for alpha in (1 + 1e-6, 1 - 1e-9):
        assert renyi.bound(logs, alpha).item() == pytest.approx(logs.mean().item(), abs=0.02)
        assert renyi.bound(logs + 1e5, alpha).item() == pytest.approx((logs + 1e5).mean().item(), rel=1e-4)
    assert renyi.bound(logs, 1e5).item() == pytest.approx(logs.min().item(), abs=0.05)
    assert renyi.bound(logs, -1e5).item() == pytest.approx(logs.max().item(), abs=0.05)
    assert renyi.bound(logs.double(), 0.0).item() == pytest.approx(logs.double().logsumexp(0).item() - math.log(3))


@pytest.mark.parametrize("alpha", ORDERS)
def test_influence_is_the_gradient(alpha):
    logs = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    shares = torch.tensor([0.5, 0.2, 0.3]).double().log()
    (slope,) = torch.autograd.grad(renyi.bound(logs, alpha, shares), logs)
    torch.testing.assert_close(slope, renyi.influence(logs.detach(), alpha, shares))


def test_shares_count_draws_as_often_as_they_stand_for():
    logs = torch.tensor([0.3, -1.0]).double()
    for alpha in ORDERS:
        repeated = renyi.bound(logs[[0, 0, 0, 1]], alpha)
        torch.testing.assert_close(renyi.bound(logs, alpha, torch.tensor([0.75, 0.25]).double().log()), repeated)


FAMILIES = {
    "diagonal": families.DiagonalGaussian(0.3),
    "lowrank": families.LowRankGaussian(2, initial_std=0.3),
    "mixture": families.MixtureOfGaussians(2, initial_std=0.3),
}


@pytest.mark.parametrize("alpha", [INF, 2.0, 0.5, 0.0, -1.0, -INF])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_the_loss_is_the_bound_of_its_own_draws(family, alpha):
    """Densities at each draw, the data term scaled by N/B, and the KL's weight within the log-weights."""
    x, y, num_data, draws = torch.randn(6, 3).double(), torch.randint(2, (6,)), 50, 3
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    method = bl.Variational(family=family, renyi=alpha, samples=draws, temperature=0.5)
    bnn = bl.bayesianize(
        model, method, likelihood=likelihoods.Categorical(), prior=priors.Normal(0.7), num_data=num_data
    )
    for name, parameter in bnn.model.named_parameters():
        if name == "mixture_logits":
            parameter.data.copy_(torch.tensor([0.0, 0.8]))
    torch.manual_seed(5)
    loss = bnn.loss((x, y), kl_weight=0.6)
    torch.manual_seed(5)
    q, posterior = family.density(bnn.model, bnn.sites.names, {}), bnn.posterior_
    logs, shares, std = [], [], torch.tensor(0.7, dtype=torch.float64)
    for component, log_weight in enumerate(q.log_weights):
        for _ in range(draws):
            w = {name: value.detach() for name, value in q.draw(q.noise(), component).weights.items()}
            outputs = torch.func.functional_call(bnn.model, w, (x,))
            data = num_data / len(x) * outputs.log_softmax(-1)[torch.arange(6), y].sum()
            log_p = sum(distributions.Normal(0.0, std).log_prob(value).sum() for value in w.values())
            logs.append(data + 0.3 * (log_p - posterior.log_prob(w)))
            shares.append(log_weight.detach() - math.log(draws))
    expected = -renyi.bound(torch.stack(logs), alpha, torch.stack(shares)) / num_data
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    terms = bnn.terms
    assert loss.item() == pytest.approx((terms.nll + terms.kl_weight * terms.kl / num_data).item(), rel=1e-9)
    assert terms.nll.item() > -math.log(6) / num_data  # the NLL, and at most log K for choosing between draws


class Silent(likelihoods.Likelihood):
    """Data that say nothing."""

    name = "silent"

    def log_prob(self, outputs, targets):
        return 0 * outputs.sum(1)


def test_a_closed_form_kl_is_not_in_the_log_weights():
    """Without data, α = 0 gives log ∫ q (p/q) = 0 however far q is from p; the KL would stay."""
    method = bl.Variational(families.DiagonalGaussian(0.6), renyi=0.0, samples=400)
    bnn = bl.bayesianize(nn.Linear(1, 1, bias=False).double(), method, likelihood=Silent(), num_data=1)
    bnn.model.weight.data.fill_(0.5)
    x = torch.zeros(1, 1).double()
    kl = priors.Normal(1.0).kl(torch.tensor([0.5]), torch.tensor([0.6])).item()
    assert kl > 0.3
    assert abs(bnn.loss((x, x)).item()) < 0.15


def regression() -> tuple[torch.Tensor, torch.Tensor]:
    """Two inputs whose weights have posterior correlation −ρ under a N(0, 3²) prior and noise 1."""
    precision = torch.tensor([[1.0, RHO], [RHO, 1.0]]).double() / (1 - RHO**2) - torch.eye(2).double() / 9
    return (X := torch.linalg.cholesky(precision).T), X @ torch.tensor([0.5, -1.0]).double()


def fitted(alpha: float, steps: int = 80) -> tuple[bl.Bayesian, torch.Tensor]:
    X, y = regression()
    method = bl.Variational(families.DiagonalGaussian(0.6), renyi=alpha, samples=8, antithetic=True)
    model = nn.Linear(2, 1, bias=False).double()
    bnn = bl.bayesianize(model, method, likelihood=likelihoods.Gaussian(1.0), prior=priors.Normal(3.0), num_data=2)
    bnn.model.weight.data.copy_(linear_regression(X, y, 1.0, 1 / 9)[0])
    optimizer, path = bnn.optimizer(0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        bnn.loss((X, y[:, None])).backward()
        optimizer.step()
        if step >= steps // 2:
            path.append(bnn.model.weight_log_std.detach().clone())
    return bnn, (2 * torch.stack(path).mean()).exp()


def test_training_at_a_low_order_fits_wider():
    """From the same start, the optimum of the ELBO, which lies between."""
    X, y = regression()
    torch.testing.assert_close(linear_regression(X, y, 1.0, 1 / 9)[1].diagonal(), torch.ones(2).double())
    narrow, wide = (fitted(alpha)[1].item() for alpha in (6.0, 0.2))
    assert 0.8 * stationary(6.0) < narrow < 0.95 * stationary(1.0)
    assert 1.3 * stationary(1.0) < wide < 1.5


@pytest.fixture
def bayesian() -> tuple[bl.Bayesian, list, float]:
    X, y = regression()
    mean, _, evidence = linear_regression(X, y, 1.0, 1 / 9)
    model, prior = nn.Linear(2, 1, bias=False).double(), priors.Normal(3.0)
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=likelihoods.Gaussian(1.0), prior=prior, num_data=2)
    bnn.model.weight.data.copy_(mean)
    bnn.model.weight_log_std.data.fill_(0.5 * math.log(0.5))
    return bnn, [(X, y[:, None])], evidence.item()


def test_evidence_at_every_order(bayesian):
    bnn, data, evidence = bayesian
    generator = torch.Generator().manual_seed(4)
    orders = (INF, 1.0, 0.5, 0.0, -2.0)
    found = {alpha: bl.log_evidence(bnn, data, 200, renyi=alpha, generator=generator) for alpha in orders}
    for alpha, value in found.items():
        assert value.is_bound == (alpha >= 0)
        assert value.num_data == 2
    for alpha in (1.0, 0.5, 0.0):
        exact = evidence - (divergence(alpha, torch.tensor(0.5).double()).item() if alpha else 0.0)
        assert abs(found[alpha].value - exact) < 4 * found[alpha].std_error + 0.02
    assert abs(found[0.0].value - evidence) < 0.3 * abs(found[1.0].value - evidence)
    assert [found[a].kind for a in (1.0, 0.0, 0.5, INF)] == ["elbo", "importance-weighted", "renyi 0.5", "renyi inf"]
    assert math.isinf(found[INF].std_error)
    assert "≈" in repr(found[-2.0])
    closed = bl.log_evidence(bnn, data, 200, generator=generator)
    assert closed.kind == "elbo"
    assert abs(closed.value - found[1.0].value) < 4 * (closed.std_error + found[1.0].std_error)


def test_the_error_of_an_evidence_is_honest(bayesian):
    bnn, data, _ = bayesian
    runs = [bl.log_evidence(bnn, data, 40, renyi=0.5) for _ in range(30)]
    spread = torch.tensor([run.value for run in runs]).std().item()
    assert sum(run.std_error for run in runs) / 30 == pytest.approx(spread, rel=0.4)


def test_other_posteriors_have_an_importance_weighted_evidence():
    """Laplace is exact here, so that every draw has the same weight: the evidence itself."""
    X, y = regression()
    evidence = linear_regression(X, y, 1.0, 1 / 9)[2].item()
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data.copy_(linear_regression(X, y, 1.0, 1 / 9)[0])
    bnn = bl.bayesianize(model, bl.Laplace("full"), likelihood=likelihoods.Gaussian(1.0), prior=priors.Normal(3.0))
    bnn.fit(bl.data.Loader(X, y[:, None], batch_size=2))
    for alpha in (0.0, 2.0, -INF):
        assert bl.log_evidence(bnn, [(X, y[:, None])], 3, renyi=alpha).value == pytest.approx(evidence, rel=1e-4)


def test_evidence_of_a_pruned_network_leaves_the_zeros_out(bayesian):
    bnn, data, _ = bayesian
    pruned = bl.prune(bnn, bl.Plan({"weight": torch.tensor([[True, False]])}))
    (x, y), value = data[0], bl.log_evidence(pruned, data, 500, renyi=0.0)
    exact = linear_regression(x[:, :1], y[:, 0], 1.0, 1 / 9)[2].item()
    assert value.value == pytest.approx(exact, abs=4 * value.std_error + 0.02)


def test_settings_are_checked():
    for alpha in (math.nan, "half", None, True):
        with pytest.raises((TypeError, ValueError), match="renyi"):
            bl.Variational(renyi=alpha, samples=4)
    with pytest.raises(ValueError, match="at least 2"):
        bl.Variational(renyi=0.5)
    for estimator in ("local", "flipout"):
        with pytest.raises(ValueError, match="needs independent weights"):
            bl.Variational(renyi=0.5, samples=4, estimator=estimator)
    assert bl.Variational(renyi=0.5, samples=4).noise_at == "shared"
    assert bl.Variational(renyi=1).noise_at == "local"
    with pytest.raises(ValueError, match="renyi"):
        bl.log_evidence(fitted(1.0, steps=1)[0], [], renyi=math.nan)


def test_the_prior_is_that_of_the_weights_left():
    weights, mask = {"w": torch.tensor([0.0, 1.0]).double()}, torch.tensor([False, True])
    expected = distributions.Normal(0.0, 1.0).log_prob(torch.tensor(1.0).double())
    torch.testing.assert_close(log_prior({"w": priors.Normal(1.0)}, weights, {"w": mask}), expected)
