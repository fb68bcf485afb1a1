"""Inference in the subspace of a path of gradient descent."""

from __future__ import annotations

import pytest
import torch
from targets import worst
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.errors import BayeslimError
from oracles import linear_regression

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = X @ torch.linspace(-1, 1, 6, dtype=torch.float64) + torch.randn(40, generator=torch.Generator().manual_seed(2))


def fitted(method: bl.Method, model: nn.Module, x: Tensor = X, **options) -> tuple[bl.Bayesian, bl.Fit]:
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(1.0))
    data = bl.data.Loader(x, Y[:, None], batch_size=20)
    return bnn, bnn.fit(data, **{"epochs": 10, "lr": 0.02, "seed": 3} | options)


def subspace_of(bnn: bl.Bayesian, rank: int) -> Tensor:
    """An orthonormal basis of what the draws span around their mean."""
    draws = bnn.posterior_.values["weight"].flatten(1)
    _, sizes, vectors = torch.linalg.svd(draws - draws.mean(0), full_matrices=False)
    assert (sizes[rank:] < 1e-9 * sizes[0]).all()
    return vectors[:rank]


def test_the_posterior_on_the_subspace():
    """For linear regression it is a Gaussian: that of all weights, given that the rest of them is where ŵ is."""
    torch.manual_seed(0)
    bnn, result = fitted(bl.Subspace(rank=2, samples=300, warmup=100, leapfrog=6), nn.Linear(6, 1, bias=False).double())
    basis = subspace_of(bnn, 2)
    draws = bnn.posterior_.values["weight"].flatten(1)
    mean, covariance, _ = linear_regression(X, Y, 1.0, 1.0)
    precision = covariance.inverse()
    inside = (basis @ precision @ basis.T).inverse()
    origin = draws[0]
    centre = inside @ basis @ precision @ (mean - origin)
    assert worst(((draws - origin) @ basis.T)[::2], centre, inside) < 4.5
    assert worst(((draws - origin) @ basis.T)[::2], centre, inside / 2) > 6
    assert 0.3 < result.details["explained"] <= 1
    assert len(result.details["spread"]) == 2


def test_the_whole_space_is_the_whole_posterior():
    method = bl.Subspace(rank=2, samples=300, warmup=100, leapfrog=6)
    bnn, _ = fitted(method, nn.Linear(2, 1, bias=False).double(), X[:, :2], epochs=10)
    draws = bnn.posterior_.values["weight"].flatten(1)
    assert worst(draws[::2], *linear_regression(X[:, :2], Y, 1.0, 1.0)[:2]) < 4.5


def test_a_network_with_norms_and_a_temperature():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()
    method = bl.Subspace(rank=3, snapshots=10, samples=20, warmup=40, leapfrog=5, chains=2, temperature=3.0)
    bnn, result = fitted(method, model, dtype=torch.float32)
    assert bnn.posterior_.count == 40
    assert bnn.posterior_.values["0.weight"].dtype == torch.float32
    assert torch.isfinite(bl.predict(bnn, X).mean).all()
    assert len(result.details["acceptance"]) == 2
    assert bnn.model[1].momentum == 0.1
    assert "path" not in bnn.state


def test_no_path_no_subspace():
    with pytest.raises(BayeslimError, match="spans no direction"):
        fitted(bl.Subspace(rank=1, snapshots=2, samples=1), nn.Linear(6, 1).double(), epochs=2, lr=0.0)
