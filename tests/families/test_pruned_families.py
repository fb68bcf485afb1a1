"""Pruning, learning on and learning by units, for families whose weights depend on each other."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim import families, likelihoods
from bayeslim.posteriors import LowRankCovariance, Mixture

METHODS = {
    "lowrank": bl.Variational(families.LowRankGaussian(2, initial_std=0.1)),
    "mixture": bl.Variational(families.MixtureOfGaussians(2, initial_std=0.1)),
    "dropout": bl.Variational(families.DropoutGaussian(0.2)),
    "dropout of units": bl.Variational(families.DropoutGaussian(0.2, per="unit"), estimator="shared"),
    "dropout, fixed": bl.Variational(families.DropoutGaussian(alpha=0.2, learn=False)),
    "renyi": bl.Variational(families.DiagonalGaussian(0.1), renyi=0.5, samples=2),
    "mixture, renyi": bl.Variational(families.MixtureOfGaussians(2, initial_std=0.1), renyi=-math.inf, samples=2),
    "lowrank, pairs": bl.Variational(families.LowRankGaussian(2, initial_std=0.1), samples=2, antithetic=True),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
X = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] + X[:, 1] > 0).long()


def fitted(method: bl.Variational) -> bl.Bayesian:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    bnn = bl.bayesianize(model, method, likelihood=likelihoods.Categorical(), num_data=len(X))
    bnn.fit([(X, Y)], epochs=5, lr=1e-2)
    return bnn


@every_method
def test_pruning_conditions_the_posterior_and_training_keeps_the_zeros(method):
    bnn = fitted(method)
    plan = bl.plan(bnn, bl.Budget(sparsity=0.5))
    before = copy.deepcopy(bnn.state_dict())
    pruned = bl.prune(bnn, plan)
    assert all(torch.equal(before[name], value) for name, value in bnn.state_dict().items())
    given = bnn.posterior_.condition(plan.masks)
    for name, value in pruned.posterior_.mean.items():
        torch.testing.assert_close(value, given.mean[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(pruned.posterior_.variance[name], given.variance[name], rtol=1e-4, atol=1e-8)
    if isinstance(given, Mixture):
        torch.testing.assert_close(pruned.posterior_.weights, given.weights, rtol=1e-4, atol=1e-7)
    if isinstance(given, LowRankCovariance):
        moved = pruned.posterior_.mean["2.weight"] - bnn.posterior_.mean["2.weight"]
        assert moved[plan.masks["2.weight"]].abs().max() > 1e-5
    pruned.fit([(X, Y)], epochs=3, lr=1e-2)
    trained = pruned.posterior_
    for name, mask in plan.masks.items():
        assert not trained.mean[name][~mask].any()
        assert not trained.variance[name][~mask].any()
        assert not trained.sample(3)[name][:, ~mask].any()
        assert not torch.equal(trained.mean[name], given.mean[name])
    again = bl.prune(pruned, bl.Budget(sparsity=0.8))
    assert sum(int((~m).sum()) for m in again.masks.values()) >= 0.8 * 42 - 1
    assert torch.isfinite(bl.predict(again, X, samples=2).mean).all()
    assert bl.log_evidence(again, [(X, Y)], 2).is_bound


@every_method
def test_a_pruned_network_is_saved_with_its_zeros(method, tmp_path):
    pruned = bl.prune(fitted(method), bl.Budget(sparsity=0.5))
    bl.save(pruned, tmp_path / "pruned")
    again = bl.load(tmp_path / "pruned", model=nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)))
    draws = [one.posterior_.sample(2, generator=torch.Generator().manual_seed(0)) for one in (pruned, again)]
    assert all(torch.equal(draws[0][name], draws[1][name]) for name in draws[0])
    losses = []
    for one in (pruned.train(), again.train()):
        torch.manual_seed(0)
        losses.append(one.loss((X, Y)).item())
    assert losses[0] == losses[1]


@every_method
def test_units_go_and_the_rest_is_a_smaller_plain_network(method):
    bnn = fitted(method)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.4), granularity="unit", example=X)
    slim = bl.compact(pruned, example=X)
    assert slim[0].out_features < 6
    torch.testing.assert_close(slim(X), pruned.mean_network()(X), rtol=1e-4, atol=1e-5)


@every_method
def test_learning_on_remembers(method):
    """The next prior has the means and variances of single weights under q."""
    bnn = fitted(method)
    later = bl.continual.update(bnn, bl.data.Loader(X, Y, batch_size=20), epochs=1, lr=1e-3)
    q = bnn.posterior_
    for name, prior in later.priors.items():
        torch.testing.assert_close(prior.mean, q.mean[name])
        torch.testing.assert_close(prior.std, q.std[name])
    assert later.num_data == 80
    assert not torch.equal(later.posterior_.mean["2.weight"], q.mean["2.weight"])


def test_weights_that_nothing_reads_move_no_survivor():
    """The weights into a unit that goes have a mean, but no answer depends on them."""
    bnn = fitted(METHODS["lowrank"])
    with torch.no_grad():
        bnn.model[2].weight[:, 0] = 0
    masks = {"0.weight": torch.ones(6, 5).bool(), "2.weight": torch.ones(2, 6).bool()}
    masks["0.weight"][0] = masks["2.weight"][:, 0] = False
    unread = {"0.weight": ~masks["0.weight"]}
    silent = bl.prune(bnn, bl.Plan(masks, unread=unread)).posterior_
    heard = bl.prune(bnn, bl.Plan(masks)).posterior_
    kept = masks["0.weight"]
    torch.testing.assert_close(silent.mean["0.weight"][kept], bnn.posterior_.mean["0.weight"][kept])
    assert not torch.allclose(heard.mean["0.weight"][kept], bnn.posterior_.mean["0.weight"][kept])
