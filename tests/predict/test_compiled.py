"""Compiled predictions are those of `predict`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import UnsupportedModel

X, Y = torch.randn(24, 6), torch.arange(24) % 3


def fitted(method: bl.Method, likelihood: bl.likelihoods.Likelihood | None = None) -> bl.Bayesian:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    bnn = bl.bayesianize(model, method, likelihood=likelihood or bl.likelihoods.Categorical())
    bnn.fit(bl.data.Loader(X, Y, 8), epochs=4, progress=False)
    return bnn


@pytest.mark.parametrize(("method", "rows"), [(bl.DeepEnsemble(11), 1), (bl.SWAG(every=1, samples=4), 5)], ids=repr)
def test_particles_predict_alike(method, rows):
    bnn = fitted(method)
    fast = bl.compiled(bnn, X, backend="aot_eager")
    for x in (X, X[:rows]):
        found, wanted = fast(x), bl.predict(bnn, x)
        assert found.kind == wanted.kind
        for part in ("samples", "mean", "probs", "variance", "aleatoric", "epistemic"):
            torch.testing.assert_close(getattr(found, part), getattr(wanted, part))


def test_as_many_particles_as_asked_for():
    bnn = fitted(bl.DeepEnsemble(6))
    found = bl.compiled(bnn, X, samples=3, backend="aot_eager")(X)
    torch.testing.assert_close(found.samples, bl.predict(bnn, X, samples=3).samples)


@pytest.mark.parametrize("likelihood", [bl.likelihoods.Categorical(), None], ids=["classes", "values"])
def test_drawn_networks_follow_from_the_generator(likelihood):
    bnn = fitted(bl.Variational(), likelihood)
    fast = bl.compiled(bnn, X, samples=16, backend="aot_eager")
    first, second = (fast(X, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(first.samples, second.samples)
    assert not torch.equal(first.samples, fast(X).samples)
    wanted = bl.predict(bnn, X, samples=16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(first.samples, wanted.samples)


def test_a_method_with_a_way_of_its_own_is_refused():
    bnn = bl.bayesianize(nn.Linear(6, 3), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    bnn.fit(bl.data.Loader(X, Y, 8))
    with pytest.raises(UnsupportedModel, match=r"laplace does not predict by averaging drawn networks"):
        bl.compiled(bnn, X)
