"""Methods on minibatches recover the posteriors of linear and logistic regression.

A linear layer of many outputs with the same targets is as many regressions, whose posteriors are all alike and
independent: its rows are independent draws, and the errors of their moments are known.
"""

from __future__ import annotations

import pytest
import torch
from targets import errors, worst
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.likelihoods import Bernoulli, Gaussian
from oracles import linear_regression

ROWS = 400
RUNS = {
    "sgld": (bl.SGLD, {}, 0.04, 200),
    "psgld": (bl.PSGLD, {}, 2e-2, 200),
    "sghmc": (bl.SGHMC, {}, 8e-3, 120),
    "sghmc-adapted": (bl.SGHMC, {"adapt": True}, 2e-3, 150),
    "sgnht": (bl.SGNHT, {}, 8e-3, 120),
}
MIX = torch.tensor([[1.0, 0.3], [0.0, 0.9]], dtype=torch.float64)
X = torch.randn(40, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) @ MIX
NOISE = torch.randn(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
VALUES = X @ torch.tensor([1.0, -0.5], dtype=torch.float64) + NOISE
CLASSES = (VALUES > 0).double()


def logistic_moments() -> tuple[Tensor, Tensor]:
    """Mean and covariance of the posterior of logistic regression, on a grid."""
    axis = torch.linspace(-3, 6, 400, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    logits = grid @ X.T
    log_density = (
        nn.functional.logsigmoid(torch.where(CLASSES.bool(), logits, -logits)).sum(1) - grid.square().sum(1) / 2
    )
    weight = log_density.softmax(0)
    mean = weight @ grid
    return mean, (grid - mean).T @ (weight[:, None] * (grid - mean))


PROBLEMS = {
    "linear": (lambda: Gaussian(1.0), VALUES, linear_regression(X, VALUES, 1.0, 1.0)[:2]),
    "logistic": (Bernoulli, CLASSES, logistic_moments()),
}


def draws(method: bl.Method, problem: str, lr: float, epochs: int, num_data: int | None = None) -> Tensor:
    likelihood, y, _ = PROBLEMS[problem]
    model = nn.Linear(2, ROWS, bias=False).double()
    bnn = bl.bayesianize(model, method, likelihood=likelihood(), num_data=num_data)
    loader = bl.data.Loader(X, y[:, None].expand(-1, ROWS).contiguous(), batch_size=20)
    bnn.fit(loader, epochs=epochs, lr=lr, seed=3)
    return bnn.posterior_.particle(0)["weight"]


@pytest.mark.parametrize(
    ("kind", "problem"), [*((kind, "linear") for kind in RUNS), ("sgld", "logistic"), ("sghmc", "logistic")]
)
def test_mean_and_covariance(kind, problem):
    build, settings, lr, epochs = RUNS[kind]
    factor = 3 if problem == "logistic" else 1  # flatter
    found = draws(build(samples=1, **settings), problem, factor * lr, epochs)
    assert worst(found, *PROBLEMS[problem][2]) < 4.5


@pytest.mark.parametrize("kind", ["psgld", "sghmc-adapted", "sgnht"])
def test_a_batch_taken_for_the_data_is_seen(kind):
    build, settings, lr, epochs = RUNS[kind]
    found = draws(build(samples=1, **settings), "linear", lr, epochs, num_data=20)
    assert worst(found, *PROBLEMS["linear"][2]) > 6


def test_the_movement_of_a_chain_is_not_taken_for_noise_of_gradients():
    """On full batches, which have none; variances along the eigenvectors of the posterior, over the exact ones."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(100, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    y += 0.5 * torch.randn(100, generator=generator, dtype=torch.float64)
    mean, covariance = linear_regression(x, y, 0.5, 1.0)[:2]
    bnn = bl.bayesianize(
        nn.Linear(3, ROWS, bias=False).double(), bl.SGHMC(samples=1, adapt=True), likelihood=Gaussian(0.5)
    )
    loader = bl.data.Loader(x, y[:, None].expand(-1, ROWS).contiguous(), batch_size=100)
    bnn.fit(loader, epochs=600, lr=0.01, seed=3)
    found = bnn.posterior_.particle(0)["weight"] - mean
    values, vectors = torch.linalg.eigh(covariance)
    ratios = (found @ vectors).square().mean(0) / values
    assert ratios.min() > 0.8  # of 400 draws the error is 7%
    assert ratios.max() < 1.2


def test_noise_times_two_is_seen():
    mean, covariance = PROBLEMS["linear"][2]
    found = draws(bl.SGHMC(samples=1, temperature=4.0), "linear", 8e-3, 120)
    assert errors(found, mean, covariance)[1].max() > 10
    assert worst(found, mean, 4 * covariance) < 4.5


@pytest.mark.parametrize("problem", PROBLEMS)
def test_hamiltonian_monte_carlo_on_all_the_data(problem):
    likelihood, y, moments = PROBLEMS[problem]
    rows = 40
    model = nn.Linear(2, rows, bias=False).double()
    bnn = bl.bayesianize(model, bl.HMC(samples=80, warmup=80, leapfrog=10), likelihood=likelihood())
    result = bnn.fit(bl.data.Loader(X, y[:, None].expand(-1, rows).contiguous(), batch_size=40), seed=3)
    found = bnn.posterior_.values["weight"][::8].flatten(0, 1)
    assert worst(found, *moments) < 4.5
    assert worst(found, moments[0], moments[1] * 1.6) > 4.5
    assert result.details["divergences"] == [0]


@pytest.mark.parametrize("method", [bl.SGHMC(samples=1, subset="last-layer"), bl.HMC(20, 60, 10, subset=("3",))])
def test_the_last_layer_on_the_features_of_the_rest(method):
    torch.manual_seed(6)
    rows = 400 if isinstance(method, bl.SGHMC) else 80
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Dropout(0.5), nn.Linear(2, rows, bias=False)).double()
    features = model[:2](X).detach()
    bnn = bl.bayesianize(model, method, likelihood=Gaussian(1.0))
    loader = bl.data.Loader(X, VALUES[:, None].expand(-1, rows).contiguous(), batch_size=20)
    bnn.fit(loader, epochs=150, lr=0.02, seed=1) if isinstance(method, bl.SGHMC) else bnn.fit(loader, seed=1)
    found = bnn.posterior_.values["3.weight"][::4].flatten(0, 1)
    assert worst(found, *linear_regression(features, VALUES, 1.0, 1.0)[:2]) < 4.5
    assert bnn.posterior_.names == ("3.weight",)
    assert torch.equal(bnn.model[0].weight, model[0].weight)
