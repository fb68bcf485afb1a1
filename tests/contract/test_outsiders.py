"""Things of other packages: each trains, predicts, is pruned, saved and loaded as the library's own do."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import bayeslim as bl
from bayeslim.errors import UnsupportedModel
from bayeslim.stochastic import is_noisy

torch.manual_seed(0)
X = torch.randn(48, 4)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
BATCHES = [(X[:24], Y[:24]), (X[24:], Y[24:])]


@bl.linear_in_parameters
class MaskedLinear(nn.Linear):
    """Reads its parameters in a method and a property."""

    def __init__(self, inputs, outputs, bias=True):
        super().__init__(inputs, outputs, bias)
        self.register_buffer("mask", (torch.arange(inputs * outputs).view(outputs, inputs) % 3 > 0).float())

    @property
    def masked(self):
        return self.weight * self.mask

    def product(self, x):
        return F.linear(x, self.masked, self.bias)

    def forward(self, x):
        return self.product(x)


@bl.linear_in_parameters
class Reversed(nn.Linear):
    """Leaves its parameters to `super()`."""

    def forward(self, x):
        return super().forward(x.flip(-1))


@bl.linear_in_parameters(channel_dim=1)
class Pointwise(nn.Module):
    """A convolution of one position, written without one."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))

    def forward(self, x):
        return torch.einsum("bi...,oi->bo...", x, self.weight)


@bl.linear_in_parameters
class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def network(layer=MaskedLinear):
    torch.manual_seed(1)
    return nn.Sequential(layer(4, 8), nn.ReLU(), nn.Linear(8, 3))


def bayesian(model=None, method=None, **options):
    model = network() if model is None else model
    return bl.bayesianize(model, method or bl.Variational(), likelihood=bl.likelihoods.Categorical(), **options)


def live(bnn, tmp_path, model=None, granularity="weight"):
    """Train, predict, prune, save and load; return the loaded network."""
    bnn.fit(BATCHES, epochs=2, lr=1e-2, seed=0)
    assert torch.isfinite(bl.predict(bnn, X).probs).all()
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), granularity=granularity, example=X)
    assert pruned.plan_.sparsity == pytest.approx(0.5, abs=0.1)
    pruned.fit(BATCHES, epochs=1, lr=1e-3, seed=0)
    bl.save(pruned, tmp_path / "saved")
    again = bl.load(tmp_path / "saved", model=network() if model is None else model)
    assert type(again.method) is type(bnn.method)
    assert again.method == bnn.method
    mean = bl.predict(again, X, how="mean").probs
    assert torch.equal(mean, bl.predict(pruned, X, how="mean").probs)
    return again


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_a_layer(estimator, tmp_path):
    bnn = bayesian(method=bl.Variational(estimator=estimator))
    again = live(bnn, tmp_path)
    assert is_noisy(bnn.model[0])
    assert bnn.model[0].plain is MaskedLinear
    assert type(bnn.mean_network()[0]) is MaskedLinear
    again.train()(X)


@pytest.mark.parametrize("estimator", ["local", "flipout"])
@pytest.mark.parametrize("layer", [MaskedLinear, Pointwise, Reversed])
def test_noise_of_a_layer_has_the_variance_of_its_outputs(layer, estimator):
    model = layer(3, 2)
    bnn = bayesian(model, bl.Variational(estimator=estimator, family=bl.families.DiagonalGaussian(0.5)), num_data=2)
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]])
    torch.manual_seed(0)
    draws = torch.stack([bnn.train()(x) for _ in range(4000)])
    assert is_noisy(bnn.model)
    slopes = torch.autograd.functional.jacobian(lambda w: functional_call(model, {"weight": w}, (x,)), model.weight)
    variance = 0.25 * slopes.square().sum((-2, -1))
    assert torch.allclose(draws.mean(0), model(x), atol=0.12)
    assert torch.allclose(draws.var(0), variance, rtol=0.12)


def test_a_noisy_layer_is_copied_and_pickled():
    bnn = bayesian()
    bnn.fit(BATCHES, epochs=1, seed=0)
    for model in (copy.deepcopy(bnn.model), pickle.loads(pickle.dumps(bnn.model))):
        assert type(model[0]) is type(bnn.model[0])
        assert torch.equal(model.eval()(X), bnn.model.eval()(X))


def test_a_layer_that_is_not_as_declared_is_refused():
    bnn = bayesian(network(Doubled))
    with pytest.raises(UnsupportedModel, match=r"Doubled is declared linear.*not the variance"):
        bnn.fit(BATCHES, epochs=1)


def test_only_classes_of_layers_are_declared():
    with pytest.raises(TypeError, match=r"decorates a subclass of torch\.nn\.Module"):
        bl.linear_in_parameters(F.linear)


def test_a_subclass_of_a_declared_layer_is_drawn_whole():
    class Other(MaskedLinear):
        pass

    bnn = bayesian(network(Other))
    bnn.fit(BATCHES, epochs=1, seed=0)
    assert not is_noisy(bnn.model[0])
    assert is_noisy(bnn.model[2])
