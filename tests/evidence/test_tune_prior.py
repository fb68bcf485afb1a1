"""Prior precisions chosen on held-out data, against exact answers of linear regression."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl
import oracles
from bayeslim.errors import BayeslimError, BayeslimWarning, NotPositiveDefinite
from bayeslim.evidence import tune_prior
from bayeslim.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from bayeslim.posteriors import Dense

D, NOISE = 6, 1.0


def regression(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    X = torch.randn(count, D, generator=generator).double()
    truth = torch.randn(D, generator=torch.Generator().manual_seed(9)).double() / 3
    return X, (X @ truth + NOISE * torch.randn(count, generator=generator).double())[:, None]


def batches(X: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(size), y.split(size), strict=True))


def bayesian(**options) -> bl.Bayesian:
    method = bl.Laplace(curvature="exact", **options)
    return bl.bayesianize(nn.Linear(D, 1, bias=False).double(), method, likelihood=Gaussian(NOISE))


def exact_nll(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], delta: float, mean: Tensor | None = None):
    found, covariance, _ = oracles.linear_regression(train[0], train[1][:, 0], NOISE, delta)
    mean = found if mean is None else mean
    spread = ((test[0] @ covariance) * test[0]).sum(1) + NOISE**2
    return -torch.distributions.Normal(test[0] @ mean, spread.sqrt()).log_prob(test[1][:, 0])


@pytest.mark.parametrize("structure", ["kron", "full", "lowrank"])
def test_cross_validation_of_a_regression_is_exact(structure):
    X, y = regression(15)
    folds = batches(X, y, 3)
    losses = []
    for delta in tune_prior.GRID:
        total = 0.0
        for k in range(5):
            rest = [torch.cat(parts) for parts in zip(*(f for j, f in enumerate(folds) if j != k), strict=True)]
            total += float(exact_nll(tuple(rest), folds[k], delta).mean())
        losses.append(total)
    best = tune_prior.GRID[int(torch.tensor(losses).argmin())]
    assert 0 < tune_prior.GRID.index(best) < len(tune_prior.GRID) - 1
    bnn = bayesian(structure=structure)
    weights = bnn.model.weight.detach().clone()  # untrained: one Newton step is enough
    bnn.fit(folds, tune="cross-validation", folds=5, progress=False)
    assert bnn.priors["weight"].std == pytest.approx(best**-0.5)
    assert torch.equal(bnn.model.weight, weights)
    assert torch.equal(bnn.posterior_.mean["weight"], weights)


def test_the_end_of_the_grid_is_announced():
    """A network that fits held-out data exactly wants no spread at all."""
    x, y = regression(15)
    bnn = bayesian()
    mean, _, _ = oracles.linear_regression(x, y[:, 0], NOISE, 1.0)
    with torch.no_grad():
        bnn.model.weight.copy_(mean[None])
    exact = x @ mean[:, None]
    with pytest.warns(BayeslimWarning, match="the largest, 10000, predicts held-out data best"):
        bnn.fit(batches(x, y, 5), tune="grid", validate=batches(x, exact, 7), progress=False)


def test_the_grid_takes_what_predicts_validation_data_best():
    train, test = regression(15), regression(40)
    bnn = bayesian()
    mean, _, _ = oracles.linear_regression(train[0], train[1][:, 0], NOISE, 1.0)
    with torch.no_grad():
        bnn.model.weight.copy_(mean[None])
    bnn.fit(batches(*train, 5), tune="grid", validate=batches(*test, 7), progress=False)
    losses = [float(exact_nll(train, test, delta, mean).mean()) for delta in tune_prior.GRID]
    best = tune_prior.GRID[int(torch.tensor(losses).argmin())]
    assert bnn.priors["weight"].std == pytest.approx(best**-0.5)
    assert tune_prior.predictive_nll(bnn, batches(*test, 40)) == pytest.approx(min(losses), rel=1e-6)


@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        (Categorical(), torch.randint(2, (12,))),
        (Bernoulli(), torch.randint(2, (12, 2)).double()),
        (Poisson(), torch.randint(4, (12, 2)).double()),
    ],
    ids=["categorical", "bernoulli", "poisson"],
)
def test_held_out_density_of_every_likelihood(likelihood, targets):
    x = torch.randn(12, 3).double()
    bnn = bl.bayesianize(nn.Linear(3, 2).double(), bl.Laplace(curvature="exact"), likelihood=likelihood)
    bnn.fit([(x, targets)], progress=False)
    found = tune_prior.predictive_nll(bnn, [(x[:5], targets[:5]), (x[5:], targets[5:])])
    draws = bl.predict(bnn, x, samples=5000, how="joint").samples
    each = torch.stack([likelihood.log_prob(draw, targets) for draw in draws])
    expected = -(each.logsumexp(0) - torch.tensor(5000.0).log()).mean()
    assert found == pytest.approx(float(expected), rel=0.05)


def test_too_few_batches_for_the_folds():
    X, y = regression(15)
    bnn = bayesian()
    with pytest.raises(BayeslimError, match="Got 3 batches"):
        bnn.fit(batches(X, y, 5), tune="cross-validation", folds=5, progress=False)
    with pytest.raises(BayeslimError, match="yielded none"):
        bnn.fit(batches(X, y, 5), tune="grid", validate=[], progress=False)


@pytest.mark.parametrize("tune", ["grid", "cross-validation"])
def test_precisions_too_small_for_a_singular_curvature_are_passed_over(tune, monkeypatch):
    X, y = regression(30)
    bnn = bayesian(structure="full")
    possible = Dense.with_prior_precision

    def with_prior_precision(self, delta):
        if delta < 100:
            raise NotPositiveDefinite("singular")
        return possible(self, delta)

    monkeypatch.setattr(Dense, "with_prior_precision", with_prior_precision)
    bnn.fit(batches(X, y, 6), tune=tune, validate=batches(*regression(20), 10), progress=False)
    assert bnn.priors["weight"].std <= 0.1


@pytest.mark.parametrize("ignored", [0, 255])
def test_ignored_targets_have_no_part_in_the_choice(ignored):
    torch.manual_seed(0)
    network = nn.Linear(4, 4)
    x, y = torch.randn(60, 4), torch.randint(1, 4, (60,))
    held_out, labels = torch.randn(20, 4), torch.randint(1, 4, (20,))
    extra = [(torch.cat([held_out, 9 * held_out]), torch.cat([labels, torch.full_like(labels, ignored)]))]
    losses = []
    for data in (extra, [(held_out, labels)]):
        bnn = bl.bayesianize(network, bl.Laplace(), likelihood=Categorical(ignore_index=ignored))
        bnn.fit([(x, y)], tune="grid", validate=data, progress=False)
        losses.append((bnn.priors["weight"].std, tune_prior.predictive_nll(bnn, data)))
    assert losses[0][0] == losses[1][0]
