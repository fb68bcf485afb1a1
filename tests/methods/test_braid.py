"""Networks whose values part and come together again say at once what each says alone."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayeslim as bl
from bayeslim.errors import ShapeMismatch
from bayeslim.methods import chain
from bayeslim.methods.braid import Braid, at_once
from bayeslim.unrolled import unrolled
from oracles import alone, checked_ensemble, particles_of


class Residual(nn.Module):
    """With norms, shortcuts, and numbers of its own."""

    def __init__(self, **norm):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)
        self.norm, self.drop = nn.LayerNorm(8, **norm), nn.Dropout(0.5)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = h + 0.5 * F.gelu(self.second(self.norm(h)))
        return self.last(self.drop(h) - torch.sigmoid(h))


class Heads(nn.Module):
    """Two, of one body."""

    def __init__(self, dim=-1):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 5), nn.ELU())
        self.mean, self.scale, self.dim = nn.Linear(5, 2), nn.Linear(5, 1), dim

    def forward(self, x):
        h = self.body(x)
        return torch.cat([self.mean(h), self.scale(h)], dim=self.dim)


class Around(nn.Module):
    """Adds its inputs to what it made of them, of another shape before."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = x.flatten(1)
        return self.outer(x + self.inner(x)) / 3


class Weighted(nn.Module):
    """Has a parameter that is none of a layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x + self.scale * self.inner(x)


class Joining(Around):
    """Joins what it made of its inputs with what is the same for all networks."""

    def __init__(self):
        super().__init__()
        self.outer = nn.Linear(12, 2)

    def forward(self, x):
        return self.outer(torch.cat([self.inner(x), torch.exp(x)], -1))


class Doubled(Joining):
    """Joins what is the same for all with itself, and layers are given it by name."""

    def forward(self, x):
        h = self.outer(input=torch.cat([x, x], dim=-1))
        return h + self.inner(input=x).sigmoid()[:, :2]


class Named(Around):
    def forward(self, x):
        h = self.inner(input=x)
        return self.outer(input=h + torch.tanh(h))


class Idle(Around):
    """Does not use what its layers give."""

    def forward(self, x):
        self.outer(self.inner(x))
        return torch.tanh(x) * 1


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.head(self.one(x) + torch.relu(self.other(x)))


class Mixing(Around):
    """Examples have to do with each other."""

    def forward(self, x):
        x = self.inner(x.flatten(1))
        return self.outer(x + x.softmax(0))


class Growing(Around):
    """Writes over what a layer gave."""

    def forward(self, x):
        h = self.inner(x.flatten(1))
        h += 1
        return self.outer(h + h)


def row():
    """With norms, of which one comes before all weights of layers."""
    return nn.Sequential(
        nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.SiLU(), nn.Dropout(),
        nn.Linear(8, 3),
    )  # fmt: skip


BRAIDS = [
    row,
    Residual,
    lambda: Residual(elementwise_affine=False),
    lambda: Residual(bias=False),
    Heads,
    Around,
    Growing,
]
OTHERS = [lambda: Heads(dim=1), Weighted, Tied, Mixing, Joining, Doubled, Idle]


def braid(model, x, particles):
    with torch.no_grad():
        return at_once(unrolled(model.eval(), x), particles.values | particles.buffers)


@pytest.mark.parametrize("is_arm", [False, True])
@pytest.mark.parametrize("examples", [1, 3, 40, 900])
@pytest.mark.parametrize("make", BRAIDS + OTHERS)
def test_all_networks_say_what_each_says_alone(make, examples, is_arm, monkeypatch):
    monkeypatch.setattr(chain, "IS_ARM", is_arm)
    torch.manual_seed(0)
    x = torch.randn(examples, 6)
    bnn, check = checked_ensemble(make(), x)
    for _ in range(3):
        check()
    check(2)
    assert (braid(bnn.model, x, bnn.posterior_) is not None) == (make in BRAIDS)


@pytest.mark.parametrize("make", BRAIDS)
def test_what_changes_in_place_is_seen(make):
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    bnn, check = checked_ensemble(make(), x)
    check()
    before = bl.predict(bnn, x).samples
    for values in bnn.posterior_.values.values():
        values.mul_(1.5)
    check()
    assert not torch.allclose(bl.predict(bnn, x).samples, before)
    bnn.model.double()
    check()


def test_other_tensors_and_models_are_seen():
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    model = Residual().eval()
    particles = particles_of(model)
    ready = braid(model, x, particles)
    row = ready.model
    stack = particles.values | particles.buffers
    assert isinstance(ready, Braid)
    assert ready.is_of(row, stack)
    assert not ready.is_of(row, particles_of(model).values)
    assert not ready.is_of(unrolled(Residual().eval(), x), stack)
    model.double()
    assert not ready.is_of(row, stack)


def test_a_layer_that_was_replaced_is_seen():
    torch.manual_seed(0)
    bnn, check = checked_ensemble(row(), torch.randn(5, 6))
    check()
    bnn.model[3] = nn.Sigmoid()
    check()


def test_images_are_flattened_for_all_networks():
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3)
    bnn, check = checked_ensemble(row(), x)
    for _ in range(2):
        check()
    assert isinstance(importlib.import_module("bayeslim.predict")._chains[bnn.posterior_], Braid)


@pytest.mark.parametrize(("make", "shape"), [(Residual, (4, 3, 6)), (Around, (4, 3, 2)), (Growing, (4, 3, 2))])
def test_inputs_that_are_no_rows_of_features_go_to_each_network_unless_they_are_made_such(make, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    bnn = checked_ensemble(make(), torch.randn(4, 6))[0]
    assert (braid(bnn.model, torch.randn(4, 6), bnn.posterior_)(x) is None) == (make is Residual)
    for _ in range(2):
        for k, found in enumerate(bl.predict(bnn, x).samples):
            torch.testing.assert_close(found, alone(bnn.model, bnn.posterior_, k, x), rtol=1e-4, atol=1e-4)


def test_other_numbers_of_features_are_told():
    torch.manual_seed(0)
    model = Residual().eval()
    ready = braid(model, torch.randn(4, 6), particles_of(model))
    with pytest.raises(ShapeMismatch, match="takes 6 features, and was given 5"):
        ready(torch.randn(4, 5))


def test_it_is_kept_for_the_next_inputs(monkeypatch):
    predict = importlib.import_module("bayeslim.predict")
    torch.manual_seed(0)
    bnn, check = checked_ensemble(Residual(), torch.randn(5, 6))
    made = []
    monkeypatch.setattr(predict, "at_once", lambda *args: made.append(at_once(*args)) or made[-1])
    for _ in range(4):
        check()
    assert len(made) == 1
    assert isinstance(predict._chains[bnn.posterior_], Braid)


@pytest.mark.parametrize("make", [Residual, row])
@pytest.mark.parametrize("are_held", [False, True])
def test_lower_precision_after_a_prediction_is_of_every_network(make, are_held):
    """Autocast keeps weights that it has converted, by the tensors that they are."""
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    bnn, check = checked_ensemble(make(), x)
    check()
    held = list(bnn.model.parameters()) if are_held else None
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            for k, found in enumerate(bl.predict(bnn, x).samples):
                torch.testing.assert_close(
                    found.float(), alone(bnn.model, bnn.posterior_, k, x).float(), rtol=0.05, atol=0.05
                )
        before = bnn.model.eval()(x)
    del held
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(bnn.model(x), before)


def test_parameters_that_were_replaced_are_seen():
    torch.manual_seed(0)
    bnn, check = checked_ensemble(Residual(), torch.randn(5, 6))
    check()
    bnn.model.load_state_dict({name: value.double() for name, value in bnn.model.state_dict().items()}, assign=True)
    check()
