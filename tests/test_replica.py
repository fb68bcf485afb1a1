"""Replicas: other weights in a network's place, and nothing of it touched; each trap that a module tree can set."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

import bayeslim as bl
from bayeslim.errors import UnsupportedModel
from bayeslim.replica import Slots, deep_copy, reads_its_own_tensors, replicate


class Tied(nn.Module):
    """A weight under two names, and a module under two names."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight
        self.again = self.head

    def forward(self, x):
        return self.again(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Sequence(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.inner, self.head = kind(4, 5, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.inner(x[:, None].expand(-1, 3, -1))[0][:, -1])


class Attention(nn.Module):
    """Both kernels that torch fuses: that of attention and that of a whole encoder layer."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = x[:, None] + torch.arange(3.0)[:, None]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.layer(x).mean(1))


def parametrised():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))


def with_batch_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))


class InAList(nn.Module):
    """Calls registered modules through a plain list."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)
        self.order = [self.first, self.drop, torch.tanh, self.last]

    def forward(self, x):
        for step in self.order:
            x = step(x)
        return x


class InAClosure(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        first = self.first
        self.step = lambda x: F.linear(x, first.weight, first.bias)

    def forward(self, x):
        return self.last(torch.tanh(self.step(x)))


class InABoundMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.step = self.first.forward

    def forward(self, x):
        return self.last(torch.tanh(self.step(x)))


class OnlyTheDropoutInAList(nn.Module):
    """Reads no weight past the tree, but a mode."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 3)
        self.regulariser = [self.drop]

    def forward(self, x):
        return self.last(self.regulariser[0](torch.tanh(self.first(x))))


REPLICATED = {
    "tied": Tied,
    "lstm": Sequence,
    "gru": lambda: Sequence(nn.GRU),
    "attention": Attention,
    "parametrised": parametrised,
    "batch norm": with_batch_norm,
}
COPIED = {
    "list": InAList,
    "closure": InAClosure,
    "bound method": InABoundMethod,
    "mode": OnlyTheDropoutInAList,
}


def particles_of(model, count=3):
    """Draw random weights of several networks."""
    return {name: torch.randn(count, *p.shape) for name, p in model.named_parameters()}


def bayesian(model, values):
    bnn = bl.bayesianize(model, bl.DeepEnsemble(2), likelihood=bl.likelihoods.Categorical())
    bnn.state["posterior"] = bl.posteriors.Particles(values)
    return bnn


@pytest.mark.parametrize("make", (REPLICATED | COPIED).values(), ids=REPLICATED | COPIED)
@pytest.mark.parametrize("training", [True, False])
def test_other_weights_answer_as_they_do_in_the_network_itself(make, training):
    torch.manual_seed(0)
    model, x = make(), torch.randn(6, 4)
    values = particles_of(model)
    bnn = bayesian(model, values).train(training)
    before = [(id(m), m.training, dict(m._parameters), dict(vars(m))) for m in bnn.model.modules()]
    samples = bl.predict(bnn, x).samples
    after = [(id(m), m.training, dict(m._parameters), dict(vars(m))) for m in bnn.model.modules()]
    assert [a[:2] for a in before] == [a[:2] for a in after]
    assert all(old[2][k] is new[2][k] for old, new in zip(before, after, strict=True) for k in old[2])
    assert all(old[3][k] is new[3][k] for old, new in zip(before, after, strict=True) for k in old[3])
    model.eval()
    for k, sample in enumerate(samples):
        wanted = functional_call(model, {name: value[k] for name, value in values.items()}, (x,))
        torch.testing.assert_close(sample, wanted)


@pytest.mark.parametrize("make", REPLICATED.values(), ids=REPLICATED)
def test_a_replica_of_most_networks_will_do(make):
    assert reads_its_own_tensors(make(), torch.randn(6, 4))


@pytest.mark.parametrize("make", COPIED.values(), ids=COPIED)
def test_a_forward_that_reaches_past_the_tree_is_found(make):
    torch.manual_seed(0)
    assert not reads_its_own_tensors(make().train(), torch.randn(6, 4))


def test_weights_in_global_variables_are_refused():
    layer = nn.Linear(4, 3)

    class Global(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def forward(self, x):
            return layer(x)

    with pytest.raises(UnsupportedModel, match=r'Global reads "inner.weight" past the module tree'):
        reads_its_own_tensors(Global(), torch.randn(6, 4))


def test_a_random_forward_does_not_need_a_copy():
    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(x + torch.randn_like(x))

    assert reads_its_own_tensors(Random(), torch.randn(6, 4))


def test_hooks_are_shared_but_new_ones_stay_with_the_replica():
    model, x, seen = nn.Sequential(nn.Linear(4, 3)), torch.randn(6, 4), []
    model[0].register_forward_hook(lambda *_: seen.append("own"))
    twin = replicate(model)
    twin[0].register_forward_hook(lambda *_: seen.append("replica"))
    twin(x)
    assert seen == ["own", "replica"]
    model(x)
    assert seen == ["own", "replica", "own"]


def test_slots_take_a_tied_weight_under_either_name():
    model, x = Tied().eval(), torch.randn(6, 4)
    for name in ("a.weight", "b.weight"):
        twin, drawn = replicate(model), torch.randn(4, 4)
        Slots(twin).put({name: drawn})
        torch.testing.assert_close(twin(x), functional_call(model, {"a.weight": drawn}, (x,)))


def test_a_deep_copy_rebinds_closures_in_lists_and_hooks():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 3)
            first = self.first
            inner = lambda x: first(x)  # noqa: E731 - a closure within a closure
            self.steps = [lambda x: inner(x)]
            self.first.register_forward_hook(lambda module, args, output: output + first.bias)

        def forward(self, x):
            return self.steps[0](x)

    model, x = Nested(), torch.randn(6, 4)
    twin = deep_copy(model)
    torch.testing.assert_close(twin(x), model(x))
    with torch.no_grad():
        twin.first.bias.add_(1)
    torch.testing.assert_close(twin(x), model(x) + 2)


def test_a_deep_copy_keeps_what_a_users_hook_writes_to():
    model, seen = nn.Sequential(nn.Linear(4, 3)), []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    deep_copy(model)(torch.randn(6, 4))
    assert len(seen) == 1


def test_a_replica_keeps_modes_if_asked():
    model = with_batch_norm()
    model[2].eval()
    assert [m.training for m in replicate(model, evaluating=False).modules()] == [m.training for m in model.modules()]
    assert not any(m.training for m in replicate(model).modules())


def test_the_finding_is_made_once(monkeypatch):
    import bayeslim.bayesian as module

    calls = []
    monkeypatch.setattr(module, "reads_its_own_tensors", lambda *args: calls.append(args) or True)
    model = nn.Sequential(nn.Linear(4, 3))
    bnn = bayesian(model, particles_of(model))
    for _ in range(3):
        bl.predict(bnn, torch.randn(6, 4))
    assert len(calls) == 1


def test_attributes_that_a_forward_sets_do_not_reach_the_network():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = nn.Linear(4, 3), None

        def forward(self, x):
            self.last = x
            return self.inner(x)

    model = Remembers()
    bnn = bayesian(model, particles_of(model))
    bl.predict(bnn, torch.randn(6, 4))
    assert bnn.model.last is None


def test_a_plain_network_can_be_called_while_others_predict():
    """No tensor of the network itself is ever exchanged, as a functional call would do."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(6, 4)
    bnn = bayesian(model, particles_of(model, 4)).eval()
    wanted = bnn.model(x)
    stop, wrong = threading.Event(), []

    def call():
        while not stop.is_set():
            if not torch.equal(bnn.model(x), wanted):
                wrong.append(1)

    thread = threading.Thread(target=call)
    thread.start()
    for _ in range(50):
        bl.predict(bnn, x)
    stop.set()
    thread.join()
    assert not wrong
