"""A fit that is interrupted: a network that was fitted before is as it was, in every part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)

METHODS = [
    bl.DeepEnsemble(2, together=True),
    bl.DeepEnsemble(2),
    bl.SGLD(samples=3, chains=2),
    bl.Snapshot(cycles=2),
    bl.SWA(start=0.0),
    bl.SWAG(start=0.0, samples=2),
    bl.MultiSWAG(start=0.0, members=2, samples=2),
    bl.MCBatchNorm(samples=2),
    bl.HMC(samples=3, warmup=3, leapfrog=2),
    bl.Subspace(rank=2, snapshots=4, inner=bl.HMC(samples=3, warmup=3, leapfrog=2)),
]


class Interrupted(Exception):
    pass


class Ending(bl.data.Loader):
    """Batches that end with an error after five of them."""

    left = 5

    def __iter__(self):
        for batch in super().__iter__():
            if not self.left:
                raise Interrupted
            self.left -= 1
            yield batch


def bayesian(method: bl.Method) -> bl.Bayesian:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))
    noise = 0.1 if method == bl.DeepEnsemble(2, together=True) else "learned"
    return bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(noise))


def fit(bnn: bl.Bayesian, loader: type[bl.data.Loader] = bl.data.Loader) -> None:
    bnn.fit(loader(X, Y, batch_size=20), epochs=4, lr=1e-3, seed=2, progress=False)


def tensors(bnn: bl.Bayesian) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in bnn.state_dict().items()}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_an_interrupted_refit_leaves_all_as_it_was(method):
    bnn = bayesian(method)
    fit(bnn)
    state, before, step = dict(bnn.state), tensors(bnn), bnn.step
    mean = bl.predict(bnn, X, how="mean").mean
    with pytest.raises(Interrupted):
        fit(bnn, Ending)
    assert bnn.state.keys() == state.keys()
    assert all(bnn.state[key] is value for key, value in state.items())
    after = tensors(bnn)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert bnn.step == step
    assert torch.equal(bl.predict(bnn, X, how="mean").mean, mean)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_an_interrupted_first_fit_leaves_the_network_where_it_was_going(method):
    bnn = bayesian(method)
    before = tensors(bnn)
    with pytest.raises(Interrupted):
        fit(bnn, Ending)
    assert not bnn.state
    after = tensors(bnn)
    assert not torch.equal(after["0.weight"], before["0.weight"])
