"""On linear regression everything has an exact answer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl
import oracles
from bayeslim.evidence import marginal_likelihood
from bayeslim.likelihoods import Gaussian

NOISE = math.exp(float(Gaussian(0.4).log_noise))  # as the likelihood keeps it, in single precision
STD = 1.3
N, D, K = 30, 4, 2


def problem(orthogonal: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and inputs with a constant column."""
    X = torch.randn(N, D).double()
    if orthogonal:
        X = torch.linalg.qr(X - X.mean(0)).Q * 3
    design = torch.cat([X, torch.ones(N, 1).double()], 1)
    y = design @ torch.randn(D + 1, K).double() + NOISE * torch.randn(N, K).double()
    return X, y, design


def at_map(design: Tensor, y: Tensor) -> nn.Linear:
    model = nn.Linear(D, K).double()
    with torch.no_grad():
        for k in range(K):
            mean, _, _ = oracles.linear_regression(design, y[:, k], NOISE, STD**-2)
            model.weight[k], model.bias[k] = mean[:-1], mean[-1]
    return model


def bayesian(model: nn.Module, method: bl.Laplace, noise: float = NOISE) -> bl.Bayesian:
    return bl.bayesianize(model, method, likelihood=Gaussian(noise), prior=bl.priors.Normal(STD))


def batches(X: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(X[:11], y[:11]), (X[11:12], y[11:12]), (X[12:], y[12:])]


EXACT = {
    "kron": bl.Laplace(curvature="exact"),
    "kron-corrected": bl.Laplace(curvature="exact", corrected=True),
    "kfra": bl.Laplace(curvature="kfra"),
    "full": bl.Laplace("full", curvature="exact"),
    "lowrank": bl.Laplace("lowrank", curvature="exact", rank=(D + 1) * K),
    "subnetwork": bl.Laplace(subset=bl.Subnetwork((D + 1) * K, "random"), curvature="exact"),
    "diag": bl.Laplace("diag", curvature="exact"),
}


@pytest.mark.parametrize("name", EXACT)
def test_posterior_evidence_and_predictions_are_exact(name):
    X, y, design = problem(orthogonal=name == "diag")
    model = at_map(design, y)
    bnn = bayesian(nn.Sequential(model) if name == "kfra" else model, EXACT[name])
    prefix = "0." if name == "kfra" else ""
    bnn.fit(batches(X, y), progress=False)
    posterior = bnn.posterior_
    exact = [oracles.linear_regression(design, y[:, k], NOISE, STD**-2) for k in range(K)]
    for k, (mean, covariance, _) in enumerate(exact):
        found = torch.cat([posterior.mean[prefix + "weight"][k], posterior.mean[prefix + "bias"][k : k + 1]])
        torch.testing.assert_close(found, mean, rtol=1e-8, atol=1e-10)
        spread = torch.cat([posterior.variance[prefix + "weight"][k], posterior.variance[prefix + "bias"][k : k + 1]])
        torch.testing.assert_close(spread, covariance.diagonal(), rtol=1e-8, atol=1e-10)
    evidence = bl.log_evidence(bnn, batches(X, y))
    assert evidence.value == pytest.approx(float(sum(e for _, _, e in exact)), rel=1e-8)
    assert (evidence.kind, evidence.is_bound, evidence.num_data) == ("laplace", False, N)
    new = torch.cat([torch.randn(6, D).double(), torch.ones(6, 1).double()], 1)
    prediction = bl.predict(bnn, new[:, :-1])
    for k, (mean, covariance, _) in enumerate(exact):
        torch.testing.assert_close(prediction.mean[:, k], new @ mean, rtol=1e-8, atol=1e-10)
        variance = ((new @ covariance) * new).sum(1)
        torch.testing.assert_close(prediction.epistemic[:, k], variance, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(prediction.aleatoric[:, k], torch.full((6,), NOISE**2).double())


def test_the_posterior_is_the_curvature_of_the_map_loss():
    """P is the Hessian of num_data · loss at the weights, so that fit and training speak of the same posterior."""
    X, y, design = problem()
    bnn = bayesian(at_map(design, y), EXACT["full"])
    bnn.fit([(X, y)], progress=False)
    bnn.loss((X, y)).backward()
    assert bnn.model.weight.grad.abs().max() < 1e-10
    names = ["weight", "bias"]
    flat = oracles.flat(dict(bnn.model.named_parameters()), names).detach()

    def loss(vector: Tensor) -> Tensor:
        params = oracles.unflat(vector, bnn.model, names)
        nll = -bnn.likelihood.log_prob(torch.func.functional_call(bnn.model, params, X), y).sum()
        return nll - sum(bnn.priors[n].log_prob(params[n]).sum() for n in names)

    torch.testing.assert_close(bnn.posterior_.precision, torch.autograd.functional.hessian(loss, flat))


def test_training_finds_the_posteriors_mean():
    X, y, design = problem()
    bnn = bayesian(nn.Linear(D, K).double(), EXACT["kron"])
    data = torch.utils.data.TensorDataset(X, y)
    optimizer = torch.optim.LBFGS(bnn.parameters(), max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-16)
    bnn.num_data = N

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = bnn.loss((X, y))
        loss.backward()
        return loss

    optimizer.step(closure)
    bnn.fit(torch.utils.data.DataLoader(data, batch_size=10), progress=False)
    torch.testing.assert_close(bnn.posterior_.mean["weight"], at_map(design, y).weight.detach(), rtol=1e-6, atol=1e-7)


def test_priors_by_parameter():
    X, y, design = problem()
    prior = {"bias": bl.priors.Normal(5.0), "weight": bl.priors.Normal(0.5)}
    precision = torch.tensor([4.0] * D + [0.04]).double()
    model = nn.Linear(D, K).double()
    exact = [oracles.linear_regression(design, y[:, k], NOISE, precision) for k in range(K)]
    with torch.no_grad():
        for k, (mean, _, _) in enumerate(exact):
            model.weight[k], model.bias[k] = mean[:-1], mean[-1]
    for structure in ("kron", "full", "lowrank"):
        method = bl.Laplace(structure, curvature="exact")
        bnn = bl.bayesianize(model, method, likelihood=Gaussian(NOISE), prior=prior)
        bnn.fit(batches(X, y), progress=False)
        assert bl.log_evidence(bnn, batches(X, y)).value == pytest.approx(float(sum(e for _, _, e in exact)), rel=1e-8)


def test_a_prior_around_another_mean():
    X, y, design = problem()
    centre = torch.randn(K, D).double()
    shifted = y - X @ centre.T
    model = at_map(design, shifted)
    with torch.no_grad():
        model.weight += centre
    prior = {"weight": bl.priors.Normal(STD, centre), "bias": bl.priors.Normal(STD)}
    bnn = bl.bayesianize(model, EXACT["kron"], likelihood=Gaussian(NOISE), prior=prior)
    bnn.fit(batches(X, y), progress=False)
    exact = sum(oracles.linear_regression(design, shifted[:, k], NOISE, STD**-2)[2] for k in range(K))
    assert bl.log_evidence(bnn, batches(X, y)).value == pytest.approx(float(exact), rel=1e-8)


@pytest.mark.parametrize("structure", ["kron", "full", "lowrank", "diag"])
def test_a_pruned_network_is_the_smaller_regression(structure):
    X, y, design = problem(orthogonal=structure == "diag")
    bnn = bayesian(at_map(design, y), bl.Laplace(structure, curvature="exact", rank=(D + 1) * K))
    bnn.fit(batches(X, y), progress=False)
    kept = torch.tensor([True, False, True, True])
    masks = {"weight": kept.expand(K, D).clone()}
    bnn.method.condition(bnn, masks, tolerance=1e-13)
    bnn.masks = masks
    columns = torch.cat([kept, torch.tensor([True])])
    exact = [oracles.linear_regression(design[:, columns], y[:, k], NOISE, STD**-2) for k in range(K)]
    for refit in (False, True):
        if refit:
            bnn.fit(batches(X, y), progress=False)
        for k, (mean, _, _) in enumerate(exact):
            torch.testing.assert_close(bnn.model.weight[k][kept].detach(), mean[:-1], rtol=1e-6, atol=1e-8)
        assert (bnn.model.weight[:, 1] == 0).all()
        evidence = bl.log_evidence(bnn, batches(X, y)).value
        assert evidence == pytest.approx(float(sum(e for _, _, e in exact)), rel=1e-6)
        variance = ((design[:, columns] @ exact[0][1]) * design[:, columns]).sum(1)
        prediction = bl.predict(bnn, X, samples=2000, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(prediction.epistemic[:, 0], variance, rtol=0.3, atol=1e-6)
        torch.testing.assert_close(prediction.mean[:, 0], design[:, columns] @ exact[0][0], rtol=1e-5, atol=1e-7)


def test_evidence_of_another_noise_needs_no_new_pass():
    X, y, design = problem()
    model = at_map(design, y)
    for structure in ("kron", "diag", "full", "lowrank"):
        method = bl.Laplace(structure, curvature="exact", rank=(D + 1) * K)
        one, other = bayesian(model, method, 0.5), bayesian(model, method, 1.0)
        for bnn in (one, other):
            bnn.fit(batches(X, y), progress=False)
        factor = float(one.likelihood.log_noise.double().mul(2).exp())
        scaled = marginal_likelihood.scaled(one.posterior_, factor)
        data = marginal_likelihood.data_term(other.model, other.likelihood, batches(X, y))
        centre = {"weight": 0.0, "bias": 0.0}
        expected = bl.log_evidence(other, batches(X, y)).value
        direct = marginal_likelihood.log_marginal_likelihood(data.value, scaled, centre)
        lazy = marginal_likelihood.log_marginal_likelihood(data.value, one.posterior_, centre, torch.tensor(factor))
        assert float(direct) == pytest.approx(expected, rel=1e-8)
        assert float(lazy) == pytest.approx(expected, rel=1e-7)
        assert math.isfinite(expected)
