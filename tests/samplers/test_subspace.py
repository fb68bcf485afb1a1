"""Inference in the subspace of a path of gradient descent."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from interruptions import Stop, cut_short
from targets import worst
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.errors import BayeslimError, UnsupportedModel
from bayeslim.methods import subspace
from bayeslim.methods.shared.coordinates import to_mode_
from bayeslim.methods.shared.full_batch import FullBatch
from bayeslim.samplers import StochasticHamiltonian
from oracles import linear_regression

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = X @ torch.linspace(-1, 1, 6, dtype=torch.float64) + torch.randn(40, generator=torch.Generator().manual_seed(2))


def fitted(
    method: bl.Method, model: nn.Module, x: Tensor = X, batch_size: int = 20, **options
) -> tuple[bl.Bayesian, bl.Fit]:
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(1.0))
    data = bl.data.Loader(x, Y[:, None], batch_size)
    return bnn, bnn.fit(data, **{"epochs": 10, "lr": 0.02, "seed": 3} | options)


def subspace_of(bnn: bl.Bayesian, rank: int) -> Tensor:
    """An orthonormal basis of what the draws span around their mean."""
    draws = bnn.posterior_.values["weight"].flatten(1)
    _, sizes, vectors = torch.linalg.svd(draws - draws.mean(0), full_matrices=False)
    assert (sizes[rank:] < 1e-9 * sizes[0]).all()
    return vectors[:rank]


def coordinates(bnn: bl.Bayesian) -> tuple[Tensor, Tensor, Tensor]:
    """The draws in a subspace of two dimensions, and mean and covariance of the exact posterior there.

    For linear regression it is a Gaussian: that of all weights, given that the rest of them is where ŵ is.
    """
    basis = subspace_of(bnn, 2)
    draws = bnn.posterior_.values["weight"].flatten(1)
    mean, covariance, _ = linear_regression(X, Y, 1.0, 1.0)
    precision = covariance.inverse()
    inside = (basis @ precision @ basis.T).inverse()
    origin = draws[0]
    return (draws - origin) @ basis.T, inside @ basis @ precision @ (mean - origin), inside


def test_the_posterior_on_the_subspace():
    torch.manual_seed(0)
    method = bl.Subspace(rank=2, inner=bl.HMC(300, 100, 6))
    bnn, result = fitted(method, nn.Linear(6, 1, bias=False).double(), batch_size=40)
    draws, mean, covariance = coordinates(bnn)
    assert worst(draws[::2], mean, covariance) < 4.5
    assert worst(draws[::2], mean, covariance / 2) > 6
    assert 0.3 < result.details["explained"] <= 1
    assert len(result.details["spread"]) == 2
    assert result.details["divergences"] == [0]


def test_chains_by_stochastic_gradients():
    torch.manual_seed(0)
    method = bl.Subspace(rank=2, burn_in=0.5, inner=bl.SGHMC(samples=60, burn_in=0.1))
    model = nn.Linear(6, 1, bias=False).double()
    bnn, _ = fitted(method, model, epochs=30, inner_epochs=600, inner_lr=5.0)
    draws, mean, covariance = coordinates(bnn)
    assert worst(draws, mean, covariance) < 4.5
    assert worst(draws, mean, covariance / 3) > 6


@pytest.mark.parametrize("prior", [1.0, torch.linspace(0.2, 3, 6, dtype=torch.float64)[None]])
def test_laplace_is_exact(prior, monkeypatch):
    """The Gaussian itself, before draws are made, also where the prior is not alike in all directions."""
    seen: list[bl.Bayesian] = []
    monkeypatch.setattr(subspace, "to_mode_", lambda within, loader: (seen.append(within), to_mode_(within, loader)))
    torch.manual_seed(0)
    method = bl.Subspace(rank=2, inner=bl.Laplace(), draws=400)
    likelihood, prior = bl.likelihoods.Gaussian(1.0), bl.priors.Normal(prior, 0.3)
    bnn = bl.bayesianize(nn.Linear(6, 1, bias=False).double(), method, likelihood=likelihood, prior=prior)
    bnn.fit(bl.data.Loader(X, Y[:, None], batch_size=20), epochs=10, lr=0.02, seed=3)
    (within,) = seen
    space, found = within.model, within.posterior_
    delta = torch.as_tensor(prior.std, dtype=torch.float64).expand(1, 6).flatten() ** -2
    precision = X.T @ X + torch.diag(delta)
    inside = space.directions.T @ precision @ space.directions
    centre = torch.linalg.solve(inside, space.directions.T @ (X.T @ Y + 0.3 * delta - precision @ space.centre))
    torch.testing.assert_close(found.mean["z"], centre, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.covariance, inside.inverse(), rtol=1e-8, atol=1e-8)
    draws = bnn.posterior_.values["weight"].flatten(1)
    at = torch.linalg.lstsq(space.directions, (draws - space.centre).T).solution.T
    assert worst(at, centre, inside.inverse()) < 4.5
    assert bnn.posterior_.count == 400


def test_priors_that_are_not_normal():
    model = nn.Linear(6, 1, bias=False).double()
    likelihood, prior = bl.likelihoods.Gaussian(1.0), bl.priors.Laplace(0.05)
    with pytest.raises(UnsupportedModel, match="Normal prior"):
        bl.bayesianize(model, bl.Subspace(inner=bl.Laplace()), likelihood=likelihood, prior=prior)
    data = bl.data.Loader(X[:2], Y[:2, None], batch_size=2)

    def error(seed: int) -> float:
        """Compute the errors of the draws' moments along the subspace, in standard errors."""
        bnn = bl.bayesianize(model, bl.Subspace(rank=1, inner=bl.HMC(150, 60, 6)), likelihood=likelihood, prior=prior)
        bnn.fit(data, epochs=40, lr=0.02, seed=seed)
        draws = bnn.posterior_.values["weight"].flatten(1)
        origin, along = draws.mean(0), (draws - draws.mean(0)).abs().max() * subspace_of(bnn, 1)[0]
        steps = torch.linspace(-4, 4, 4001, dtype=torch.float64)
        line = origin + steps[:, None] * along
        weight = (-0.5 * (line @ X[:2].T - Y[:2]).square().sum(1) - line.abs().sum(1) / 0.05).softmax(0)
        mean = (weight * steps).sum()
        variance = (weight * (steps - mean).square()).sum()
        at = (draws - origin) @ along / along.square().sum()
        return worst(at[::3, None], mean[None], variance.view(1, 1))

    assert median(map(error, (3, 4, 5))) < 4  # tails are heavier than a Gaussian's, and one chain may be far off


def test_a_pruned_network_keeps_its_zeros():
    torch.manual_seed(0)
    mask = torch.tensor([[True, False, True, True, False, True]])
    for inner in (bl.HMC(3, 3, 3), bl.Laplace()):
        method, model = bl.Subspace(rank=2, inner=inner, draws=3), nn.Linear(6, 1, bias=False).double()
        bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(1.0))
        bnn.masks["weight"] = mask
        bnn.keep_zeros()
        bnn.fit(bl.data.Loader(X, Y[:, None], batch_size=20), epochs=10, lr=0.02, seed=3)
        values = bnn.posterior_.values["weight"]
        assert values.shape == (3, 1, 6)
        assert ((values == 0) == ~mask).all()


def test_what_is_no_part_of_the_subspace_stays():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5), nn.Tanh(), nn.Linear(3, 1)).double()
    method = bl.Subspace(rank=2, inner=bl.SGHMC(samples=4))
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian("learned"), sites="0")
    bnn.fit(bl.data.Loader(X, Y[:, None], batch_size=20), epochs=5, lr=0.02, seed=3, inner_epochs=4, inner_lr=0.1)
    assert all(p.grad is None for p in bnn.parameters())
    assert bnn.posterior_.names == ("0.weight", "0.bias")
    assert bnn.training


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner": bl.SWA()}, "inner must be HMC"),
        ({"inner": "hmc"}, "inner must be HMC"),
        ({"inner": bl.HMC(subset="last-layer")}, "subset"),
        ({"inner": bl.Laplace("diag")}, "structure"),
        ({"draws": 0}, "draws"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        bl.Subspace(**settings)


def test_only_stochastic_gradients_take_a_learning_rate():
    model = nn.Linear(6, 1).double()
    with pytest.raises(TypeError, match="inner_lr"):
        fitted(bl.Subspace(inner=bl.SGLD()), model, inner_epochs=3)
    with pytest.raises(TypeError, match="HMC takes neither"):
        fitted(bl.Subspace(), model, inner_lr=0.1)


def test_saved_with_its_inner_method(tmp_path):
    bnn, _ = fitted(bl.Subspace(rank=1, snapshots=2, inner=bl.Laplace(), draws=2), nn.Linear(6, 1).double())
    bl.save(bnn, tmp_path / "model")
    again = bl.load(tmp_path / "model", nn.Linear(6, 1).double())
    assert again.method == bnn.method
    assert torch.equal(again.posterior_.values["weight"], bnn.posterior_.values["weight"])


def test_the_whole_space_is_the_whole_posterior():
    method = bl.Subspace(rank=2, inner=bl.HMC(300, 100, 6))
    bnn, _ = fitted(method, nn.Linear(2, 1, bias=False).double(), X[:, :2], batch_size=40)
    draws = bnn.posterior_.values["weight"].flatten(1)
    assert worst(draws[::2], *linear_regression(X[:, :2], Y, 1.0, 1.0)[:2]) < 4.5


def test_a_network_with_norms_and_a_temperature():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()
    method = bl.Subspace(rank=3, snapshots=10, inner=bl.HMC(20, 40, 5, chains=2, temperature=3.0))
    bnn, result = fitted(method, model, dtype=torch.float32)
    assert bnn.posterior_.count == 40
    assert bnn.posterior_.values["0.weight"].dtype == torch.float32
    assert torch.isfinite(bl.predict(bnn, X).mean).all()
    assert len(result.details["acceptance"]) == 2
    assert bnn.model[1].momentum == 0.1
    assert "path" not in bnn.state


@pytest.mark.parametrize(
    ("inner", "owner", "name", "options"),
    [
        (bl.HMC(6, 10, 4), FullBatch, "__call__", {}),
        (bl.SGHMC(samples=6), StochasticHamiltonian, "update", {"inner_epochs": 40, "inner_lr": 0.1}),
        (bl.Laplace(), FullBatch, "__call__", {}),
    ],
)
def test_a_run_that_was_cut_short_goes_on_exactly(inner, owner, name, options, tmp_path, monkeypatch):
    """In the path, and then in the subspace."""

    def run(**further):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()
        return fitted(bl.Subspace(rank=2, inner=inner, draws=6), model, **options, **further)

    def stop(epoch):
        if epoch.number == 7:
            raise Stop

    whole, result = run()
    with pytest.raises(Stop):
        run(checkpoint=tmp_path, callbacks=[stop])
    with monkeypatch.context() as patch:
        cut_short(patch, owner, name, 9)
        with pytest.raises(Stop):
            run(checkpoint=tmp_path)
    resumed, again = run(checkpoint=tmp_path)
    assert again.resumed_from == 10
    assert result.details == again.details
    first, second = whole.posterior_.tensors(), resumed.posterior_.tensors()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_no_path_no_subspace():
    with pytest.raises(BayeslimError, match="there is no subspace"):
        fitted(bl.Subspace(rank=1, snapshots=2), nn.Linear(6, 1).double(), epochs=2, lr=0.0)
