"""The evidence: its gradient, its maximum, and the models it prefers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
import oracles
from bayeslim.evidence import marginal_likelihood, tune_prior
from bayeslim.likelihoods import Categorical, Gaussian
from bayeslim.posteriors.prior_precision import PriorPrecision


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double()


def data(count: int = 40) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 3, generator=generator).double()
    y = (x.sum(1) + 0.5 * torch.randn(count, generator=generator).double() > 0).long()
    return [(x[:25], y[:25]), (x[25:], y[25:])]


def fitted(structure: str = "kron", **options) -> bl.Bayesian:
    bnn = bl.bayesianize(network(), bl.Laplace(structure, **options), likelihood=Categorical())
    bnn.fit(data(), progress=False)
    return bnn


def evidence_at(bnn: bl.Bayesian, prior: PriorPrecision) -> Tensor:
    posterior = bnn.posterior_.with_prior_precision(prior)
    return marginal_likelihood.log_marginal_likelihood(-7.0, posterior, tune_prior.prior_mean(bnn))


STRUCTURES = ("kron", "diag", "full", "lowrank")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradient_is_that_of_finite_differences(structure):
    bnn = fitted(structure, rank=10)
    start = torch.tensor([0.3, 1.0, 2.5]).double().log()
    layers = ("0", "2", "3")

    def evidence(log: Tensor) -> Tensor:
        return evidence_at(bnn, dict(zip(layers, log.exp(), strict=True)))

    assert torch.autograd.gradcheck(evidence, (start.requires_grad_(),), rtol=1e-5, atol=1e-7)
    one = torch.tensor(0.7).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda d: evidence_at(bnn, d), (one,), rtol=1e-5, atol=1e-7)


def test_gradient_for_a_pruned_posterior():
    bnn = fitted()
    bnn.method.condition(bnn, {"0.weight": torch.rand(5, 3) > 0.5})
    one = torch.tensor(0.7).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda d: evidence_at(bnn, d), (one,), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("per_layer", [False, True])
def test_tuning_finds_the_largest_evidence(structure, per_layer):
    bnn = fitted(structure, rank=10)
    before = bl.log_evidence(bnn, data()).value
    found = tune_prior.by_evidence_(bnn, data(), "layer" if per_layer else "network")
    assert found == pytest.approx(bl.log_evidence(bnn, data()).value, rel=1e-9)
    assert found > before
    stds = {name: prior.std for name, prior in bnn.priors.items()}
    assert len(set(stds.values())) == (3 if per_layer else 1)
    best = {name: torch.tensor(stds[f"{name}.weight"] ** -2).double() for name in ("0", "2", "3")}
    data_term = marginal_likelihood.data_term(bnn.model, bnn.likelihood, data()).value
    top = float(evidence_at(bnn, best)) + 7.0 + data_term
    assert top == pytest.approx(found, rel=1e-9)
    for name in best if per_layer else ("all",):
        for factor in (0.9, 1.1):
            moved = {k: v * (factor if name in (k, "all") else 1) for k, v in best.items()}
            assert float(evidence_at(bnn, moved)) + 7.0 + data_term < found


def test_one_layers_precision_solves_mackays_fixed_point():
    """At the optimum δ ‖w‖² = γ, the number of well-determined weights."""
    bnn = fitted("full", curvature="exact")
    tune_prior.by_evidence_(bnn, data())
    posterior = bnn.posterior_
    delta = bnn.priors["0.weight"].std ** -2
    gamma = posterior.num_parameters - delta * float(posterior.covariance.trace())
    squares = sum(float(w.square().sum()) for w in posterior.mean.values())
    assert delta * squares == pytest.approx(gamma, rel=1e-4)


def test_the_noise_of_a_regression_is_learned_by_evidence():
    """Against a scan of the exact evidence of linear regression at its own MAP."""
    torch.manual_seed(0)
    X = torch.randn(60, 3).double()
    y = X @ torch.randn(3, 1).double() + 0.3 * torch.randn(60, 1).double()
    model = nn.Linear(3, 1, bias=False).double()
    bnn = bl.bayesianize(model, bl.Laplace(curvature="exact"), likelihood=Gaussian("learned", initial_noise=1.0))
    for _ in range(30):  # weights and hyperparameters in turn
        noise, delta = float(bnn.likelihood.log_noise.detach().double().exp()), bnn.priors["weight"].std ** -2
        mean, _, _ = oracles.linear_regression(X, y[:, 0], noise, delta)
        with torch.no_grad():
            bnn.model.weight.copy_(mean[None])
        bnn.fit([(X, y)], tune="evidence", progress=False)
    noise, delta = float(bnn.likelihood.log_noise.detach().double().exp()), bnn.priors["weight"].std ** -2
    best = oracles.linear_regression(X, y[:, 0], noise, delta)[2]
    assert bl.log_evidence(bnn, [(X, y)]).value == pytest.approx(float(best), rel=1e-4)
    for factor in (0.9, 1.1):
        assert oracles.linear_regression(X, y[:, 0], noise * factor, delta)[2] < best
        assert oracles.linear_regression(X, y[:, 0], noise, delta * factor)[2] < best + 1e-3
    assert noise == pytest.approx(0.3, rel=0.2)


def test_a_fixed_noise_is_left_alone():
    X = torch.randn(20, 3).double()
    bnn = bl.bayesianize(nn.Linear(3, 1).double(), bl.Laplace(), likelihood=Gaussian(0.7))
    bnn.fit([(X, torch.randn(20, 1).double())], tune="evidence", progress=False)
    assert float(bnn.likelihood.noise) == pytest.approx(0.7)


def test_evidence_prefers_the_true_polynomial_degree():
    torch.manual_seed(1)
    t = torch.linspace(-1, 1, 40).double()
    y = (1 - 2 * t + 3 * t**3)[:, None] + 0.1 * torch.randn(40, 1).double()
    evidences = {}
    for degree in range(1, 9):
        X = torch.stack([t**k for k in range(1, degree + 1)], 1)
        design = torch.cat([X, torch.ones(40, 1).double()], 1)
        mean, _, exact = oracles.linear_regression(design, y[:, 0], 0.1, 1 / 9)
        model = nn.Linear(degree, 1).double()
        with torch.no_grad():
            model.weight.copy_(mean[None, :-1])
            model.bias.copy_(mean[-1:])
        bnn = bl.bayesianize(model, bl.Laplace(), likelihood=Gaussian(0.1), prior=bl.priors.Normal(3.0))
        bnn.fit([(X, y)], progress=False)
        evidences[degree] = bl.log_evidence(bnn, [(X, y)]).value
        assert evidences[degree] == pytest.approx(float(exact), rel=1e-5)
    assert max(evidences, key=evidences.get) == 3


def test_evidence_tells_a_useless_layer_from_a_useful_one():
    """A network with an input that matters has more evidence than one that may not see it."""
    x, y = (torch.cat(parts) for parts in zip(*data(200), strict=True))
    evidences = []
    for blind in (False, True):
        torch.manual_seed(0)
        seen = x * 0 if blind else x
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        bnn = bl.bayesianize(model, bl.Laplace(), likelihood=Categorical())
        loader = DataLoader(TensorDataset(seen, y), batch_size=100)
        bnn.fit(loader, epochs=60, lr=3e-2, tune="evidence", seed=0, progress=False)
        evidences.append(bl.log_evidence(bnn, loader).value)
    assert evidences[0] > evidences[1] + 20


def test_online_tuning_follows_training():
    x, y = (torch.cat(parts) for parts in zip(*data(200), strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=50)
    results = {}
    for tune in (None, "online"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        bnn = bl.bayesianize(model, bl.Laplace(), likelihood=Categorical(), prior=bl.priors.Normal(30.0))
        fit = bnn.fit(loader, epochs=40, lr=3e-2, tune=tune, tune_every=10, per_layer=True, seed=0, progress=False)
        results[tune] = bl.log_evidence(bnn, loader).value
        assert len(fit.history) == 40
        assert sum("log_evidence" in epoch for epoch in fit.history) == (0 if tune is None else 4)
    assert fit.details["log_evidence"] == pytest.approx(results["online"])
    assert results["online"] > results[None] + 10
    assert bnn.priors["0.weight"].std < 3


def test_precisions_stay_finite_where_the_evidence_has_no_maximum():
    model = nn.Linear(2, 2).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    bnn = bl.bayesianize(model, bl.Laplace(), likelihood=Categorical())
    bnn.fit([(torch.randn(9, 2).double(), torch.arange(9) % 2)], tune="evidence", progress=False)
    assert math.isfinite(bl.log_evidence(bnn, [(torch.randn(9, 2).double(), torch.arange(9) % 2)]).value)
    assert 0 < bnn.priors["weight"].std < 0.1
