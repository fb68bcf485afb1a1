"""Learned hyperparameters are where the mathematics says: closed-form optima, and exact type-II maximum likelihood."""

from __future__ import annotations

import math
from itertools import pairwise

import integrals
import pytest
import torch
from scipy import optimize
from torch import distributions as D
from torch import nn

import bayeslim as bl
from bayeslim import priors
from bayeslim.likelihoods import Gaussian
from oracles import linear_regression

NOISE = 0.5


def regression(prior, features: int = 12, **options) -> bl.Bayesian:
    model = nn.Linear(features, 1, bias=False).double()
    return bl.bayesianize(model, bl.Variational(**options), likelihood=Gaussian(NOISE), prior=prior, num_data=40)


def two_layers(prior, sites="weights", **options) -> bl.Bayesian:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    bnn = bl.bayesianize(
        model, bl.Variational(**options), likelihood=Gaussian(1.0), prior=prior, sites=sites, num_data=9
    )
    for name in bnn.sites.names:
        bnn.model.get_parameter(name).data.normal_()
        bnn.model.get_parameter(f"{name}_log_std").data.uniform_(-2, 0)
    return bnn


def set_posterior(bnn: bl.Bayesian, mean, std) -> None:
    bnn.model.weight.data.copy_(torch.as_tensor(mean).expand_as(bnn.model.weight))
    bnn.model.weight_log_std.data.copy_(torch.as_tensor(std).log().expand_as(bnn.model.weight))


def kl(bnn: bl.Bayesian) -> torch.Tensor:
    return bnn.method._weights(bnn)[2]


def moments(bnn: bl.Bayesian, *names: str) -> tuple[torch.Tensor, torch.Tensor]:
    q = bnn.posterior_
    return tuple(torch.cat([part[n].flatten() for n in names or bnn.sites.names]) for part in (q.mean, q.std))


def minimise(bnn: bl.Bayesian) -> None:
    """The hyperparameters alone, the posterior held."""
    optimizer = torch.optim.LBFGS(bnn.hyperparameters.parameters(), max_iter=100, line_search_fn="strong_wolfe",
                                  tolerance_grad=1e-10, tolerance_change=1e-14)  # fmt: skip

    def closure():
        optimizer.zero_grad()
        value = kl(bnn)
        value.backward()
        return value

    optimizer.step(closure)


def test_a_learned_std_finds_its_closed_form():
    bnn = two_layers(priors.Normal(3.0, learn=True))
    minimise(bnn)
    mean, std = moments(bnn)
    best = (mean.square() + std.square()).mean().sqrt()
    for name in ("0.weight", "2.weight"):
        assert bnn.priors[name].std.item() == pytest.approx(best.item(), rel=1e-6)
    closed = two_layers(priors.Normal(3.0, learn="closed form"))
    closed.load_state_dict(bnn.state_dict())
    closed._maximise_priors()
    assert closed.priors["0.weight"].std.item() == pytest.approx(best.item(), rel=1e-12)


def test_a_learned_mean_and_std_are_those_of_all_weights_together():
    bnn = two_layers(priors.Normal(3.0, learn=("mean", "std")))
    minimise(bnn)
    mean, std = moments(bnn)
    assert bnn.priors["0.weight"].mean.item() == pytest.approx(mean.mean().item(), rel=1e-6)
    spread = ((mean - mean.mean()).square() + std.square()).mean().sqrt()
    assert bnn.priors["0.weight"].std.item() == pytest.approx(spread.item(), rel=1e-6)


def test_a_learned_laplace_scale_finds_its_closed_form():
    bnn = two_layers(priors.Laplace(3.0, learn=True))
    minimise(bnn)
    mean, std = moments(bnn)
    sizes = [integrals.expectation(torch.abs, m, s) for m, s in zip(mean.tolist(), std.tolist(), strict=True)]
    best = sum(sizes) / len(sizes)
    assert bnn.priors["0.weight"].scale.item() == pytest.approx(best, rel=1e-6)
    closed = two_layers(priors.Laplace(3.0, learn="closed form"))
    closed._maximise_priors()
    assert closed.priors["0.weight"].scale.item() == pytest.approx(best, rel=1e-9)


def test_a_closed_form_around_a_centre():
    bnn = two_layers(priors.Normal(3.0, 0.7, learn="closed form"))
    bnn._maximise_priors()
    mean, std = moments(bnn)
    best = ((mean - 0.7).square() + std.square()).mean().sqrt()
    assert bnn.priors["2.weight"].std.item() == pytest.approx(best.item(), rel=1e-12)
    assert bnn.priors["2.weight"].mean == 0.7


@pytest.mark.parametrize("learn", [True, "closed form"])
def test_who_shares_a_scale(learn):
    prior = priors.Normal(1.0, learn=learn)
    everything = ("0.weight", "0.bias", "2.weight", "2.bias")
    cases = [
        (prior, [everything]),
        ({"0": prior, "2": priors.Normal(1.0, learn=learn)}, [everything[:2], everything[2:]]),
        ({"0": prior, "all": prior}, [everything]),
        (priors.per_layer(prior), [everything[:2], everything[2:]]),
        (priors.per_parameter(prior), [(name,) for name in everything]),
        ({"2.bias": priors.Normal(2.0), "all": priors.per_layer(prior)}, [everything[:2], ("2.weight",)]),
    ]
    for given, groups in cases:
        bnn = two_layers(given, sites="all")
        assert len(bnn.hyperparameters) == len(groups)
        minimise(bnn) if learn is True else bnn._maximise_priors()
        for group in groups:
            mean, std = moments(bnn, *group)
            best = (mean.square() + std.square()).mean().sqrt().item()
            assert [bnn.priors[name].std.item() for name in group] == pytest.approx([best] * len(group), rel=1e-5)
    assert bnn.priors["2.bias"].std == 2.0


def test_a_scale_for_every_weight_is_automatic_relevance_determination():
    """KL = ½ log(1 + 1/α), Kharitonov, Molchanov & Vetrov 2018, arXiv:1811.00596."""
    bnn = regression(priors.Normal(torch.ones(1, 12), learn="closed form"))
    set_posterior(bnn, torch.randn(12).double(), torch.rand(12).double() + 0.1)
    bnn._maximise_priors()
    q = bnn.posterior_
    alpha = (q.std["weight"] / q.mean["weight"]).square()
    assert kl(bnn).item() == pytest.approx((0.5 * torch.log1p(1 / alpha)).sum().item(), rel=1e-9)


def test_a_scale_for_every_row():
    bnn = two_layers({"0": priors.Normal(torch.ones(5, 1), learn="closed form"), "all": priors.Normal(1.0)})
    bnn._maximise_priors()
    q = bnn.posterior_
    rows = (q.mean["0.weight"].square() + q.variance["0.weight"]).mean(1, keepdim=True).sqrt()
    torch.testing.assert_close(bnn.priors["0.weight"].std, rows)


def test_the_closed_form_has_the_envelopes_gradient():
    """The gradient at the best scale, held, is that of the KL with the scale eliminated: n/2 log mean w² − Σ log σ."""
    bnn = two_layers(priors.Normal(learn="closed form"))
    bnn._maximise_priors()
    names = [n for n, _ in bnn.model.named_parameters() if "weight" in n]
    parameters = [bnn.model.get_parameter(n) for n in names]
    found = torch.autograd.grad(kl(bnn), parameters)
    squares, logs, count = 0.0, 0.0, 0
    for name in ("0.weight", "2.weight"):
        log_std = bnn.model.get_parameter(f"{name}_log_std")
        squares = squares + (bnn.model.get_parameter(name).square() + (2 * log_std).exp()).sum()
        logs, count = logs + log_std.sum(), count + log_std.numel()
    eliminated = count / 2 * (squares / count).log() - logs
    assert kl(bnn).item() == pytest.approx(eliminated.item(), rel=1e-9)
    for got, wanted in zip(found, torch.autograd.grad(eliminated, parameters), strict=True):
        torch.testing.assert_close(got, wanted)


def test_weights_that_were_cut_do_not_count():
    bnn = two_layers(priors.Laplace(learn="closed form"))
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
    pruned._maximise_priors()
    left = torch.cat([pruned.masks[n].flatten() for n in pruned.sites.names])
    mean, std = (part[left] for part in moments(pruned))
    sizes = [integrals.expectation(torch.abs, m, s) for m, s in zip(mean.tolist(), std.tolist(), strict=True)]
    assert pruned.priors["0.weight"].scale.item() == pytest.approx(sum(sizes) / len(sizes), rel=1e-9)
    pruned.masks = {name: torch.zeros_like(mask) for name, mask in pruned.masks.items()}
    pruned._maximise_priors()  # with nothing left it stays
    assert pruned.priors["0.weight"].scale.item() == pytest.approx(sum(sizes) / len(sizes), rel=1e-9)


LEARNABLE = {
    "normal": (priors.Normal(0.5, 0.1, learn=("std", "mean")), {"std": math.log, "mean": float}),
    "laplace": (priors.Laplace(0.5, learn=True), {"scale": math.log}),
    "student": (priors.StudentT(2.5, 0.5, learn=True), {"df": math.log, "scale": math.log}),
    "mixture": (
        priors.ScaleMixture(0.3, 1.0, 0.2, learn=True),
        {"pi": lambda p: math.log(p / (1 - p)), "sigma1": math.log, "sigma2": math.log},
    ),
}
INVERSE = {math.log: math.exp, float: float}


@pytest.mark.parametrize("name", LEARNABLE)
def test_every_hyperparameter_has_the_gradient_of_the_divergence(name):
    """Many weights with one posterior: the average over them is the expectation, for estimates too."""
    prior, scales = LEARNABLE[name]
    n, m, s = 200_000, 0.4, 0.3
    bnn = regression(prior, features=n)
    set_posterior(bnn, m, torch.tensor(s))
    kl(bnn).backward()
    assert set(scales) == set(prior.learned)
    for field, to_raw in scales.items():

        def divergence(raw: float, field=field, to_raw=to_raw) -> float:
            value = INVERSE.get(to_raw, lambda r: 1 / (1 + math.exp(-r)))(raw)
            return integrals.kl(prior.with_settings({field: value}), m, s)

        wanted = integrals.slope(divergence, to_raw(prior.setting(field)), 1e-3)
        found = getattr(bnn.hyperparameters[0], f"raw_{field}").grad.item() / n
        assert found == pytest.approx(wanted, abs=6 / n**0.5), field


def orthogonal_data(n: int = 40, d: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns at right angles, so that the exact posterior is independent."""
    X = torch.linalg.qr(torch.randn(n, d).double())[0] * 3
    return X, X @ (0.4 * torch.randn(d).double()) + NOISE * torch.randn(n).double()


def best_std(X, y) -> float:
    def loss(log_std: float) -> float:
        return -linear_regression(X, y, NOISE, math.exp(-2 * log_std))[2].item()

    return math.exp(optimize.minimize_scalar(loss, bounds=(-5, 3), method="bounded", options={"xatol": 1e-10}).x)


def test_the_gradient_at_the_posterior_is_that_of_the_exact_evidence():
    X, y = orthogonal_data()
    for std in (0.1, 0.5, 2.0):
        bnn = regression(priors.Normal(std, learn=True))
        mean, covariance, _ = linear_regression(X, y, NOISE, std**-2)
        set_posterior(bnn, mean, covariance.diagonal().sqrt())
        kl(bnn).backward()
        log_std = torch.tensor(math.log(std), dtype=torch.float64, requires_grad=True)
        (-linear_regression(X, y, NOISE, torch.exp(-2 * log_std))[2]).backward()
        assert bnn.hyperparameters[0].raw_std.grad.item() == pytest.approx(log_std.grad.item(), rel=1e-8)


def test_closed_forms_climb_to_type_ii_maximum_likelihood():
    """Exact posteriors and closed-form scales in turn are expectation maximisation."""
    X, y = orthogonal_data()
    bnn = regression(priors.Normal(2.0, learn="closed form"))
    evidences = []
    for _ in range(100):
        mean, covariance, evidence = linear_regression(X, y, NOISE, bnn.priors["weight"].std.item() ** -2)
        evidences.append(evidence.item())
        set_posterior(bnn, mean, covariance.diagonal().sqrt())
        bnn._maximise_priors()
    assert bnn.priors["weight"].std.item() == pytest.approx(best_std(X, y), rel=1e-6)
    assert all(b >= a - 1e-9 for a, b in pairwise(evidences))


@pytest.mark.parametrize("learn", [True, "closed form"])
def test_training_finds_type_ii_maximum_likelihood(learn):
    X, y = orthogonal_data()
    bnn = regression(priors.Normal(1.0, learn=learn), antithetic=True, samples=2)
    set_posterior(bnn, 0.0, torch.tensor(0.2))
    optimizer = bnn.optimizer(0.05)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 200)
        optimizer.zero_grad()
        bnn.loss((X, y[:, None])).backward()
        optimizer.step()
    std = bnn.priors["weight"].std.item()
    assert std == pytest.approx(best_std(X, y), rel=0.05)
    evidence = linear_regression(X, y, NOISE, std**-2)[2].item()
    found = bl.log_evidence(bnn, [(X, y[:, None])], samples=60, generator=torch.Generator().manual_seed(0))
    assert abs(found.value - evidence) < 4 * found.std_error + 0.3


def test_a_hyperprior_is_added_once():
    hyperprior = D.Gamma(torch.tensor(2.0).double(), 3.0)
    batch = torch.randn(4, 6).double(), torch.randn(4, 3).double()
    losses = []
    for own in (None, hyperprior):
        bnn = two_layers(priors.Normal(0.7, learn=True, hyperprior=own), sites="all")
        torch.manual_seed(3)
        losses.append(bnn.loss(batch, kl_weight=0.5).item())
        kls = bnn.terms.kl.item()
    added = -hyperprior.log_prob(torch.tensor(0.7).double()).item()
    assert losses[1] - losses[0] == pytest.approx(0.5 * added / 9, rel=1e-6)
    assert kls == pytest.approx(kl(bnn).item() + added, rel=1e-6)
    value = bl.log_evidence(bnn, [batch], samples=2, generator=torch.Generator().manual_seed(0)).value
    plain = two_layers(priors.Normal(0.7), sites="all")
    assert value == pytest.approx(bl.log_evidence(plain, [batch], 2, generator=torch.Generator().manual_seed(0)).value)


def test_a_hyperprior_pulls_what_is_learned():
    """With a Gamma(a, r) density on s the optimum solves n/s − Σw²/s³ = (a−1)/s − r."""
    shape, rate = 30.0, 40.0
    bnn = regression(priors.Normal(1.0, learn=True, hyperprior=D.Gamma(torch.tensor(shape).double(), rate)))
    set_posterior(bnn, torch.linspace(-1, 1, 12).double(), torch.tensor(0.2).double())
    optimizer = torch.optim.LBFGS(bnn.hyperparameters.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = kl(bnn) - bnn.priors.log_hyperprior()
        value.backward()
        return value

    optimizer.step(closure)
    s = bnn.priors["weight"].std.item()
    mean, std = moments(bnn)
    squares = (mean.square() + std.square()).sum().item()
    assert 12 / s - squares / s**3 == pytest.approx((shape - 1) / s - rate, abs=1e-4)


def test_hyperpriors_of_several_and_of_our_own():
    own = {"pi": D.Beta(2.0, 2.0), "sigma1": priors.Laplace(1.0)}
    prior = priors.ScaleMixture(0.25, 1.5, 0.1, learn=True, hyperprior=own)
    values = {"pi": torch.tensor(0.25), "sigma1": torch.tensor(1.5), "sigma2": torch.tensor(0.1)}
    wanted = D.Beta(2.0, 2.0).log_prob(torch.tensor(0.25)) + D.Laplace(0.0, 1.0).log_prob(torch.tensor(1.5))
    assert prior.log_hyperprior(values).item() == pytest.approx(wanted.item())
    separate = two_layers(priors.per_layer(priors.Normal(0.7, learn=True, hyperprior=D.HalfCauchy(1.0))))
    once = D.HalfCauchy(1.0).log_prob(torch.tensor(0.7)).item()
    assert separate.priors.log_hyperprior().item() == pytest.approx(2 * once)
    assert two_layers(priors.Normal(0.7, learn=True)).priors.log_hyperprior() is None


@pytest.mark.parametrize("family", ["lowrank", "mixture"])
@pytest.mark.parametrize("prior", [priors.Normal, priors.Laplace])
def test_closed_forms_for_other_families(family, prior):
    """Against draws from the posterior."""
    chosen = {
        "lowrank": bl.families.LowRankGaussian(rank=2, initial_std=0.3),
        "mixture": bl.families.MixtureOfGaussians(components=2, initial_std=0.3),
    }[family]
    bnn = regression(prior(learn="closed form"), family=chosen, features=4)
    optimizer = bnn.optimizer(0.1)
    for _ in range(3):
        bnn.loss((torch.randn(5, 4).double(), torch.randn(5, 1).double())).backward()
        optimizer.step()
    draws = bnn.posterior_.sample(20_000)["weight"]
    found = bnn.priors["weight"]
    if prior is priors.Normal:
        assert found.std.item() == pytest.approx(draws.square().mean().sqrt().item(), rel=0.02)
    else:
        assert found.scale.item() == pytest.approx(draws.abs().mean().item(), rel=0.02)
