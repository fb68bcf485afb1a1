"""Networks of any kind under one vmap: only where it does the same, and leaves nothing behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.methods import mapped
from bayeslim.posteriors import Particles

MEMBERS = 6


class Residual(nn.Module):
    """A network with a forward of its own, to which a test may add something."""

    def __init__(self, extra=None):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(()))
        self.extra, self.kept, self.calls = extra, [], 0

    def forward(self, x):
        h = x + self.norm(self.conv(x)).relu()
        y = self.head(h.mean((2, 3)))
        return y if self.extra is None else self.extra(self, h, y)


def keeps(network, h, y):
    network.last = h
    return y


def gathers(network, h, y):
    network.kept.append(h)
    return y


def counts(network, h, y):
    network.calls += 1
    return y


def writes(network, h, y):
    network.count += 1
    return y


def branches(network, h, y):
    return y if y.sum() > 0 else -y


def drops(network, h, y):
    return y + 0 * torch.rand(2)


def ensemble(extra=None):
    torch.manual_seed(0)
    model = Residual(extra).eval()
    bnn = bl.bayesianize(model, bl.DeepEnsemble(MEMBERS), likelihood=bl.likelihoods.Gaussian())
    values = {n: torch.randn(MEMBERS, *p.shape) for n, p in model.named_parameters()}
    buffers = {"norm.running_mean": torch.randn(MEMBERS, 3), "norm.running_var": torch.rand(MEMBERS, 3) + 0.5}
    if extra is writes:
        buffers["count"] = torch.zeros(MEMBERS)
    bnn.state["posterior"] = Particles(values, buffers=buffers)
    return bnn


def check(bnn, x):
    outputs = bl.predict(bnn, x).samples
    for k, found in enumerate(outputs):
        twin = copy.deepcopy(bnn.model).eval()
        twin.extra = branches if twin.extra is branches else None
        twin.load_state_dict(bnn.posterior_.network(k, twin), strict=False)
        with torch.no_grad():
            torch.testing.assert_close(found, twin(x))


@pytest.fixture
def called(monkeypatch):
    """Which networks were mapped, and how often, here as on a GPU."""
    calls = []
    tried = mapped._tried

    def recorded(model, *args):
        outputs = tried(model, *args)
        calls.append(outputs is not None)
        return outputs

    monkeypatch.setattr(mapped, "FEW", {"cpu": (2**10, 2**12)})
    monkeypatch.setattr(mapped, "_tried", recorded)
    return calls


def test_networks_are_called_both_ways_once_and_then_abreast(called, monkeypatch):
    bnn, x = ensemble(), torch.randn(5, 1, 4, 4)
    check(bnn, x)
    assert mapped._agrees[bnn.posterior_]
    monkeypatch.setattr("bayeslim.passes.call", None)  # nothing goes one by one any more
    check(bnn, x)
    bnn.posterior_.values["conv.weight"].mul_(2)
    check(bnn, torch.randn(3, 1, 6, 6))
    assert called == [True] * 3


@pytest.mark.parametrize("extra", [keeps, gathers, counts, writes, branches, drops])
def test_networks_that_do_more_go_one_by_one(extra, called):
    bnn, x = ensemble(extra), torch.randn(5, 1, 4, 4)
    for _ in range(3):
        check(bnn, x)
    assert called == ([] if extra is writes else [extra not in (branches, drops)])
    assert not mapped._agrees[bnn.posterior_]
    if extra is keeps:
        assert torch.isfinite(bnn.model.last).all()
        assert bnn.model.last.shape == (5, 3, 4, 4)
    if extra is gathers:
        assert len(bnn.model.kept) == 3 * MEMBERS
        assert torch.stack(bnn.model.kept).isfinite().all()
    if extra is counts:
        assert bnn.model.calls == 3 * MEMBERS
    if extra is writes:
        assert not bnn.posterior_.buffers["count"].any()
        assert not bnn.model.count


def test_a_network_that_begins_to_keep_something_goes_one_by_one_from_then_on(called):
    bnn, x = ensemble(), torch.randn(5, 1, 4, 4)
    check(bnn, x)
    bnn.model.extra = keeps
    bnn.model.last = None
    check(bnn, x)
    assert not mapped._agrees[bnn.posterior_]
    assert bnn.model.last.sum().isfinite()


def test_networks_that_say_something_else_abreast_go_one_by_one(monkeypatch):
    bnn, x = ensemble(), torch.randn(5, 1, 4, 4)
    monkeypatch.setattr(mapped, "FEW", {"cpu": (2**10, 2**12)})
    tried = mapped._tried
    monkeypatch.setattr(mapped, "_tried", lambda *args: 1.1 * tried(*args))
    check(bnn, x)
    check(bnn, x)
    assert not mapped._agrees[bnn.posterior_]


def test_many_inputs_few_members_hooks_and_other_precisions_go_one_by_one(called):
    x = torch.randn(5, 1, 4, 4)
    bnn = ensemble()
    bl.predict(bnn, torch.randn(100, 1, 4, 4))
    bl.predict(bnn, x, samples=5)
    bnn.model.conv.register_forward_hook(lambda *_: None)
    bl.predict(bnn, x)
    assert not called
    bnn = ensemble()
    posterior = bnn.posterior_
    halves = {name: value.bfloat16() for name, value in posterior.values.items()}
    bnn.state["posterior"] = Particles(halves, buffers=posterior.buffers)
    check(bnn, x)
    assert not called
    assert not mapped._agrees[bnn.posterior_]


def test_wrong_inputs_get_the_error_of_the_network(called):
    bnn = ensemble()
    with pytest.raises(RuntimeError, match="channels"):
        bl.predict(bnn, torch.randn(5, 2, 4, 4))


def test_five_networks_that_were_made_ready_go_one_by_one_if_they_have_convolutions(called):
    x = torch.randn(5, 1, 4, 4)
    for model, quicker in ((Residual(), False), (nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), True)):
        particles = Particles({n: torch.randn(5, *p.shape) for n, p in model.named_parameters()})
        for ready, expected in ((False, True), (True, quicker)):
            assert mapped.is_worth_trying(model, particles, range(5), lambda: iter([x]), ready) is expected
