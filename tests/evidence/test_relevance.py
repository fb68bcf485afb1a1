"""A prior precision for every weight or unit, against autograd and exact Bayesian linear regression."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.evidence import marginal_likelihood, relevance, tune_prior
from bayeslim.evidence.marginal_likelihood import DataTerm
from bayeslim.posteriors import Kronecker
from oracles import linear_regression

NOISE = 0.3


def posterior(seed: int = 0) -> Kronecker:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (4, 3), "k": (2, 3, 2, 2), "b": (4,)}
    values = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    curvature = {n: 10 * torch.rand(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    return Kronecker(values, [], 1.0, rest=curvature)


@pytest.mark.parametrize("per", ["weight", "unit"])
@pytest.mark.parametrize("cut", [False, True])
def test_the_gradient_of_the_evidence_is_zero_at_the_optimum(per: relevance.Per, cut: bool) -> None:
    centre = {"w": 0.2, "k": 0.0, "b": 0.0}
    base = posterior()
    q = base.condition({"w": torch.arange(12).reshape(4, 3) % 3 != 1}) if cut else base
    tuned = relevance.maximise_relevance(q, centre, DataTerm(-5.0, 10, 10), per)
    shapes = {name: tuple(value.shape) for name, value in tuned.prior_precision.items()}
    rows = {"w": (4, 1), "k": (2, 1, 1, 1)} if per == "unit" else {"w": (4, 3), "k": (2, 3, 2, 2)}
    assert shapes == rows | {"b": (1,)}
    logs = {name: value.log().requires_grad_() for name, value in tuned.prior_precision.items()}
    under = q.with_prior_precision({name: value.exp() for name, value in logs.items()})
    value = marginal_likelihood.log_marginal_likelihood(-5.0, under, centre)
    assert value.item() == pytest.approx(tuned.log_evidence)
    for name, slope in zip(logs, torch.autograd.grad(value, list(logs.values())), strict=True):
        assert slope.abs().max() < 1e-8, name


def test_a_weight_without_curvature_or_distance_has_a_finite_precision() -> None:
    h, off = torch.tensor([0.0, 0.0, 3.0, 1e-300]).double(), torch.tensor([0.5, 0.0, 0.0, 1.0]).double()
    for found in (relevance.of_weights(h, off.square()), relevance.of_groups(h[:, None], off[:, None] ** 2, h >= -1)):
        assert torch.isfinite(found).all()
        assert found[2] == pytest.approx(torch.tensor(25.0).exp().item(), rel=1e-6)


def regression() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs without correlations, so that the exact curvature is a diagonal; the last three do not matter."""
    generator = torch.Generator().manual_seed(0)
    X = torch.linalg.qr(torch.randn(40, 6, generator=generator, dtype=torch.float64))[0] * 6
    y = X @ torch.tensor([2.0, -1.0, 0.5, 0.0, 0.0, 0.0]).double()
    return X, y + NOISE * torch.randn(40, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def linear() -> bl.Bayesian:
    torch.manual_seed(0)
    model = nn.Linear(6, 1, bias=False).double()
    bnn = bl.bayesianize(model, bl.Laplace("diag", curvature="exact"), likelihood=bl.likelihoods.Gaussian(NOISE))
    X, y = regression()
    data = bl.data.Loader(X, y[:, None], batch_size=40)
    bnn.fit(data, epochs=1500, lr=0.02, lr_schedule="cosine", tune="online", per="weight", tune_every=150, seed=0,
            progress=False)  # fmt: skip
    return bnn


def test_training_with_evidence_steps_is_exact_relevance_determination(linear: bl.Bayesian) -> None:
    """Its evidence is that of exact linear regression, whose gradient in every precision is zero or points out."""
    X, y = regression()
    log = (linear.priors["weight"].std.double()[0] ** -2).log()
    mean, _, evidence = linear_regression(X, y, NOISE, log.exp())
    torch.testing.assert_close(linear.posterior_.mean["weight"][0], mean, atol=2e-3, rtol=1e-2)
    found = bl.log_evidence(linear, bl.data.Loader(X, y[:, None], batch_size=40)).value
    assert found == pytest.approx(float(evidence), abs=0.05)
    matters = torch.tensor([True, True, True, False, False, False])
    assert log[~matters].min() > log[matters].max() + 2
    log = log.requires_grad_()
    covariance = NOISE**2 * torch.eye(len(X)).double() + (X / log.exp()) @ X.T
    exact = torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
    (slope,) = torch.autograd.grad(exact, log)
    assert slope[matters].abs().max() < 0.05
    assert slope[~matters].min() > -0.05  # towards infinite precision, or already there


def test_cuts_and_files_know_the_precisions(linear: bl.Bayesian, tmp_path: Path) -> None:
    plan = bl.plan(linear, bl.Budget(sparsity=0.5), criterion="opd")
    assert plan.masks["weight"].tolist() == [[True, True, True, False, False, False]]
    bl.save(linear, tmp_path)
    found = bl.load(tmp_path, nn.Linear(6, 1, bias=False).double())
    torch.testing.assert_close(found.priors["weight"].std, linear.priors["weight"].std)
    torch.testing.assert_close(found.posterior_.variance["weight"], linear.posterior_.variance["weight"])


@pytest.mark.parametrize("per", ["network", "layer", "unit", "weight"])
def test_training_reads_the_precisions_that_were_tuned(per: relevance.Per) -> None:
    """The tensors stay the same objects during training, as a captured step needs it."""
    X, y = torch.randn(60, 4), torch.randint(3, (60,))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    bnn = bl.bayesianize(model, bl.Laplace("diag"), likelihood=bl.likelihoods.Categorical())
    seen: list[tuple[int, float]] = []

    def look(epoch: bl.train.Epoch) -> None:
        std = bnn.priors["0.weight"].std
        seen.append((id(std), float(std.double().mean())))

    data = bl.data.Loader(X, y, batch_size=20)
    bnn.fit(data, epochs=4, lr=0.01, tune="online", per=per, tune_every=2, seed=0, progress=False, callbacks=[look])
    assert len({identity for identity, _ in seen}) == 1
    assert seen[0][1] != seen[-1][1]
    shape = {"unit": (5, 1), "weight": (5, 4)}.get(per)
    std = bnn.priors["0.weight"].std
    assert isinstance(std, float) if shape is None else tuple(std.shape) == shape


def test_options_that_do_not_fit_are_refused() -> None:
    data = [(torch.randn(6, 4), torch.randint(3, (6,)))]
    kron = bl.bayesianize(nn.Linear(4, 3), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    with pytest.raises(ValueError, match='structure="diag"'):
        kron.fit(data, tune="evidence", per="weight")
    with pytest.raises(ValueError, match="tuned by evidence"):
        kron.fit(data, per="layer")
    with pytest.raises(ValueError, match="per must be"):
        kron.fit(data, tune="evidence", per="neuron")
    kron.fit(data)
    with pytest.raises(TypeError, match="curvature's diagonal"):
        tune_prior.by_evidence_(kron, data, "unit")
