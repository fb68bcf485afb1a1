"""Networks of particles captured as graphs: on a GPU where there is one, else by graphs that call the networks."""

from __future__ import annotations

import gc
import importlib
import weakref

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim import captured as module
from bayeslim.captured import AGAIN
from oracles import Residual, checked_ensemble

predict = importlib.import_module("bayeslim.predict")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Calls:
    """Stands for a graph: reads and writes where one would."""

    def __init__(self, way, inputs, outputs):
        self.way, self.inputs, self.outputs = way, inputs, outputs

    def replay(self):
        self.outputs.copy_(self.way(self.inputs))

    def pool(self):
        return "memory"


def _calls(way, inputs, pool):
    outputs = way(inputs)
    return Calls(way, inputs, outputs), inputs, outputs


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Without a GPU everything but the graphs themselves is as on one."""
    torch.backends.cudnn.allow_tf32 = False
    if DEVICE == "cpu":
        monkeypatch.setattr(module, "_can_be_captured", lambda x: not module._is_deterministic())
        monkeypatch.setattr(predict, "_are_calls_kept", lambda x: False)
        monkeypatch.setattr(module, "_place", lambda device: (device, 0))
        monkeypatch.setattr(module, "_graph_of", _calls)
        monkeypatch.setattr(module, "_side_by_side", module._one_by_one)
        monkeypatch.setattr(module, "_without_waiting", module._one_by_one)
        monkeypatch.setattr(module, "_seconds_of", lambda call, x: 1.0 if isinstance(call, module._Captured) else 2.0)
    yield
    torch.backends.cudnn.allow_tf32 = True


def a_row():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 70), nn.ReLU(), nn.Linear(70, 3))


def ensemble(model=None, examples=5, members=4):
    x = torch.rand(examples, 1, 8, 8, device=DEVICE)
    bnn, check = checked_ensemble((model or a_row()).to(DEVICE), x, members)
    return bnn, check, x


def graphs_of(bnn):
    return [known for known in module._kinds.get(bnn.posterior_, {}).values() if isinstance(known, module._Captured)]


def until_captured(bnn, check):
    for _ in range(AGAIN):
        assert not graphs_of(bnn)
        check()
    assert len(graphs_of(bnn)) == 1


@pytest.mark.parametrize(
    "build", [a_row, Residual, lambda: bl.zoo.lstm(3, 8, 6, 2), lambda: bl.zoo.transformer(3, 8, 8, 12, 2, 1, 6)]
)
@pytest.mark.parametrize("members", [1, 4, 7])
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")  # of each one alone
def test_networks_that_were_captured_say_what_each_says_alone(build, members):
    bnn, check, x = ensemble(build(), members=members)
    until_captured(bnn, check)
    x.copy_(torch.rand_like(x))  # not what it was captured with
    check()
    assert len(graphs_of(bnn)) == 1


@pytest.mark.parametrize(("beside", "at_once", "kept"), [(1.0, 2.0, False), (2.0, 1.0, True), (2.95, 2.95, None)])
def test_the_quickest_way_is_kept_if_it_is_quicker_than_calls(beside, at_once, kept, monkeypatch):
    ways = []
    graph_of = module._graph_of

    def seen(way, *rest):
        ways.append(getattr(way, "func", None) is predict._chained)
        return graph_of(way, *rest)

    def seconds(call, x):
        return (at_once if ways[-1] else beside) if isinstance(call, module._Captured) else 3.0

    monkeypatch.setattr(module, "_graph_of", seen)
    monkeypatch.setattr(module, "_seconds_of", seconds)
    bnn, check, x = ensemble()
    for _ in range(AGAIN):
        check()
    assert ways == [False, True] + ([] if kept is None else [kept])
    assert len(graphs_of(bnn)) == (kept is not None)
    x.copy_(torch.rand_like(x))
    check()


def test_many_inputs_are_captured_one_network_after_the_other():
    bnn, check, _ = ensemble(examples=module.MOST // 64)
    until_captured(bnn, check)


def test_what_was_predicted_stays_when_more_is():
    bnn, check, x = ensemble()
    until_captured(bnn, check)
    prediction = bl.predict(bnn, x)
    before = prediction.samples.clone()
    bl.predict(bnn, x + 1)
    assert torch.equal(prediction.samples, before)


def test_what_was_captured_is_played_without_finding_out_anything(monkeypatch):
    bnn, check, x = ensemble()
    until_captured(bnn, check)
    with monkeypatch.context() as patch:
        patch.setattr(predict, "unrolled", _fails)
        x.copy_(torch.rand_like(x))
        check()
        with torch.inference_mode(), pytest.raises(RuntimeError, match="not permitted"):
            bl.predict(bnn, x)  # is of another kind
        with pytest.raises(RuntimeError, match="not permitted"):
            bl.predict(bnn, x, samples=2)
    bnn.posterior_.values["1.weight"].mul_(2)
    check()


def test_every_kind_of_inputs_has_its_own():
    bnn, check, x = ensemble()
    until_captured(bnn, check)
    for _ in range(AGAIN):
        more = bl.predict(bnn, torch.cat([x, x])).samples
        check(samples=2)
        check()
    torch.testing.assert_close(more[:, :5], more[:, 5:])
    assert len(graphs_of(bnn)) == 3


def test_settings_that_choose_kernels_are_part_of_the_kind():
    bnn, check, _ = ensemble()
    until_captured(bnn, check)
    with torch.backends.cudnn.flags(enabled=False):
        check()
        assert len(module._kinds[bnn.posterior_]) == 2
    with torch.inference_mode():
        check()
        assert len(module._kinds[bnn.posterior_]) == 3
    check()


@pytest.mark.parametrize(("kind", "name"), [("values", "head.bias"), ("buffers", "norm.running_var")])
def test_particles_that_change_in_place_are_seen(kind, name):
    bnn, check, _ = ensemble(Residual())
    until_captured(bnn, check)
    for _ in range(AGAIN + 1):
        getattr(bnn.posterior_, kind)[name].mul_(2)
        check()
    check()


def test_hooks_are_called():
    bnn, check, _ = ensemble()
    until_captured(bnn, check)
    calls = []
    bnn.model[1].register_forward_hook(lambda *_: calls.append(1))
    check()
    assert calls


def test_nothing_is_captured_where_the_same_bits_are_wanted():
    bnn, check, _ = ensemble()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(AGAIN + 1):
            check()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not module._kinds.get(bnn.posterior_)


def test_more_batches_than_one_are_not_captured():
    bnn, _, x = ensemble()
    for _ in range(AGAIN + 1):
        bl.predict(bnn, x, batch_size=3)
    assert not graphs_of(bnn)


def test_a_network_that_writes_to_its_inputs_is_called():
    bnn, check, x = ensemble(nn.Sequential(nn.ReLU(inplace=True), *a_row()))
    for _ in range(AGAIN + 1):
        x.copy_(torch.rand_like(x) - 0.5)
        check()
    assert not graphs_of(bnn)
    assert None in module._kinds[bnn.posterior_].values()


class Looks(nn.Linear):
    """A layer that does something else with other numbers."""

    def forward(self, x):
        return super().forward(x) if float(x.sum()) > 0 else -x


Looks.__module__ = nn.Linear.__module__  # so that it is called as it is


def test_what_cannot_be_captured_is_called(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(module, "_graph_of", _fails)
    bnn, check, _ = ensemble(nn.Sequential(nn.Flatten(), Looks(64, 64)))
    for _ in range(AGAIN + 1):
        check()
    assert not graphs_of(bnn)
    other, check, _ = ensemble()
    monkeypatch.undo() if DEVICE == "cuda" else monkeypatch.setattr(module, "_graph_of", _calls)
    until_captured(other, check)


def _fails(*_):
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_graph_that_says_something_else_is_not_played(monkeypatch):
    graph_of = module._graph_of
    monkeypatch.setattr(module, "_graph_of", lambda way, *rest: graph_of(lambda x: way(x).flip(0), *rest))
    bnn, check, _ = ensemble()
    for _ in range(AGAIN + 1):
        check()
    assert not graphs_of(bnn)


def test_there_is_an_end_to_kinds(monkeypatch):
    monkeypatch.setattr(module, "KINDS", 2)
    bnn, check, x = ensemble()
    until_captured(bnn, check)
    for count in (2, 3, 4):
        for _ in range(AGAIN):
            bl.predict(bnn, x[:count])
    assert len(module._kinds[bnn.posterior_]) == 2


def test_weights_that_were_copied_to_call_networks_stay_as_long_as_the_graph():
    bnn, check, x = ensemble()
    values = bnn.posterior_.values
    values["1.weight"] = values["1.weight"].transpose(0, 1).contiguous().transpose(0, 1)  # joined, it is a copy
    until_captured(bnn, check)
    gc.collect()
    _ = [torch.full_like(values["1.weight"], torch.nan) for _ in range(100)]
    x.copy_(torch.rand_like(x))
    check()
    assert graphs_of(bnn)[0].way is not None


def test_nothing_is_left_of_particles_that_are_gone():
    bnn, check, _ = ensemble()
    until_captured(bnn, check)
    graph = weakref.ref(graphs_of(bnn)[0].networks[0])
    del bnn, check
    gc.collect()
    assert graph() is None


@pytest.mark.skipif(DEVICE == "cpu", reason="other streams and graphs are those of a GPU")
def test_predictions_in_a_graph_of_somebody_else_and_on_other_streams():
    bnn, check, x = ensemble()
    until_captured(bnn, check)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check()
    assert len(module._kinds[bnn.posterior_]) == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = bl.predict(bnn, x).samples
    x.copy_(torch.rand_like(x))
    graph.replay()
    torch.testing.assert_close(outputs, bl.predict(bnn, x).samples)
