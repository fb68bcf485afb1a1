"""Networks as graphs in two parts: the first gives what is the same for all, and nothing that anybody writes to."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import nn

from bayeslim import graphs as module
from bayeslim.graphs import Graph
from bayeslim.unrolled import unrolled
from oracles import checked_ensemble


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.layer, self.head = kind(4, 6, **options), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer(x.flatten(1).unflatten(1, (-1, 4)))[0][:, -1])


class Listening(Recurrent):
    """Two layers read the same, and one what the first gives."""

    def __init__(self):
        super().__init__(batch_first=True)
        self.other, self.last = nn.GRU(4, 6, batch_first=True), nn.GRU(6, 6)

    def forward(self, x):
        x = x.squeeze(1)
        both = self.layer(x)[0] + self.other(x)[0]
        return self.head(self.last(both)[0][:, -1])


class Patches(nn.Module):
    """Linear layers of parts of an image; a row of them, and one alone."""

    def __init__(self):
        super().__init__()
        self.row = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        self.layer = nn.Linear(12, 3)

    def forward(self, x):
        x = x.reshape(x.size(0), 3, 4)
        return self.row(x).sum(1) + self.layer(x.flatten(1))


class Overwriting(Patches):
    """Adds to a copy of its inputs, in place."""

    def forward(self, x):
        y = x.transpose(2, 3).reshape(-1, 12)
        y += self.layer.bias.sum()
        return self.layer(y) + self.row(x.reshape(-1, 3, 4)).sum(1)


class Rectifying(Patches):
    """Its first layer writes to a copy of its inputs."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(x.transpose(2, 3).flatten(1))
        return self.layer(y) * y.sum(1, keepdim=True) + self.row(x.reshape(-1, 3, 4)).sum(1)


class Named(nn.Module):
    """Its layers have names that a graph has a use for."""

    def __init__(self):
        super().__init__()
        self.first, self.rest, self.targets, self.bind = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x):
        x = x.flatten(1)
        return self.bind(self.first(x) + self.rest(x) * self.targets(x))


def test_all_networks_say_what_each_says_alone():
    torch.manual_seed(0)
    for make in (Recurrent, Listening, Patches, Overwriting, Rectifying, Named):
        for examples in (2, 30):
            _, check = checked_ensemble(make(), torch.randn(examples, 1, 3, 4))
            check()
            check()
            check(samples=2)


@pytest.mark.parametrize(("make", "values"), [(Recurrent, 1), (Listening, 2), (Patches, 2)])
def test_what_comes_before_weights_is_computed_once(make, values, monkeypatch):
    counts = {"begun": 0}
    begun = module.recurrent.begun

    def counted(layer, x):
        counts["begun"] += 1
        return begun(layer, x)

    monkeypatch.setattr(module.recurrent, "begun", counted)
    model, x = make().eval(), torch.randn(5, 1, 3, 4)
    bnn, check = checked_ensemble(model, x)
    check()
    rows = unrolled(bnn.model, x)
    assert isinstance(rows, Graph)
    with torch.no_grad():
        found = rows.first(rows, x)
        assert len(found) == values
        assert all(value is not x for value in found)
        assert torch.equal(rows.rest(rows, *found), bnn.model(x))
    layers = sum(isinstance(layer, nn.RNNBase) for layer in model.modules())
    counts["begun"] = 0
    check()
    per_network = 1 if make is Listening else 0  # of the layer that reads what another gives
    assert counts["begun"] == layers - per_network + 4 * per_network


@pytest.mark.parametrize("make", [Overwriting, Rectifying])
def test_what_may_be_written_to_is_computed_by_every_network(make):
    model, x = make().eval(), torch.randn(5, 1, 3, 4)
    before = x.clone()
    rows = unrolled(model, x)
    assert isinstance(rows, Graph)
    with torch.no_grad():
        given = rows.first(rows, x)
        if make is Rectifying:  # a graph adds in place by adding
            assert all(map(operator.is_, given, [x]))
        assert torch.equal(rows(x), model(x))
        for _ in range(2):
            assert torch.equal(rows.rest(rows, *given), model(x))
    assert torch.equal(x, before)


def test_what_is_changed_in_a_recurrent_layer_is_seen():
    torch.manual_seed(0)
    bnn, check = checked_ensemble(Recurrent(batch_first=True), torch.randn(5, 1, 3, 4))
    check()
    calls = []
    handle = bnn.model.layer.register_forward_hook(lambda *_: calls.append(1))
    check()
    assert len(calls) == 8  # half of them by what it is compared with
    handle.remove()
    bnn.model.layer.batch_first = False
    check()
    bnn.model.layer.batch_first = True
    bnn.model.layer.forward = lambda x: (x.repeat(1, 1, 2)[:, :, :6], None)
    check()
    del bnn.model.layer.forward
    bnn.model.layer = copy.deepcopy(bnn.model.layer)
    check()


def test_layers_that_are_not_known_are_called_as_they_are():
    torch.manual_seed(0)
    for options in ({"kind": nn.RNN}, {"proj_size": 3}):
        model = Recurrent(batch_first=True, **options)
        model.head = nn.Linear(options.get("proj_size", 6), 3)
        x = torch.randn(5, 1, 3, 4)
        _, check = checked_ensemble(model, x)
        check()
        rows = unrolled(model.eval(), x)
        assert not any(isinstance(part, module.OfLayer) for part in rows.modules())
