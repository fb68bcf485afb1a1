"""Passes of one network after the other: each says what it says alone, and the model gets its own tensors back."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

import bayeslim as bl
from bayeslim import passes as module
from bayeslim.passes import converted, lent, networks_of, passes
from bayeslim.posteriors import Particles
from bayeslim.twins import outputs_of
from oracles import alone, checked_ensemble, particles_of

predicting = importlib.import_module("bayeslim.predict")


class Listed(nn.Module):
    """Reads a weight that another module has, out of a list of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.weights = [self.layer.weight]

    def forward(self, x):
        return x @ self.weights[0].mT


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Counting(nn.Module):
    """Writes to a buffer, and puts another in the place of one, in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x):
        self.calls += 1
        y = self.layer(x) + self.calls + self.last
        self.last = y.mean(0)
        return y


def with_norm():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.LayerNorm(6), nn.Flatten(), nn.Linear(144, 2)
    )


class Asking(nn.Module):
    """What it calls depends on what it is given."""

    def __init__(self):
        super().__init__()
        self.row = with_norm()

    def forward(self, x):
        return self.row(x) if len(x) else x


def recurrent():
    return bl.zoo.lstm(classes=2, features=3, hidden=4)


CASES = [
    (Listed, (5, 3)), (Tied, (5, 3)), (with_norm, (5, 1, 8, 8)), (recurrent, (5, 2, 3)), (Counting, (5, 3)),
]  # fmt: skip


def close(found, expected):
    """But for the order of roundings."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("make", "shape"), CASES)
@pytest.mark.parametrize("held", [False, True])
def test_networks_one_after_the_other_say_what_each_says_alone(make, shape, held):
    model, x = make().eval(), torch.randn(shape)
    particles = particles_of(model)
    others = list(model.parameters()) if held else []  # as an optimizer has them
    before = {name: (id(t), t.detach().clone()) for name, t in module._places_of(model)[0].items()}
    stack = {name: value.clone() for name, value in (particles.values | particles.buffers).items()}
    chosen = [2, 0, 3]
    for _ in range(2):  # from what is kept, too
        with torch.no_grad():
            found = passes(model, networks_of(particles, chosen, model), lambda: iter([x[:2], x[2:]]))
        if make is not Counting:
            for k, outputs in zip(chosen, found, strict=True):
                torch.testing.assert_close(outputs, alone(model, particles, k, x))
    if make is Counting:
        torch.testing.assert_close(found[0][:2], alone(model, particles, 2, x[:2]))
    for name, tensor in module._places_of(model)[0].items():
        assert id(tensor) == before[name][0]
        torch.testing.assert_close(tensor.detach(), before[name][1], rtol=0, atol=0)
    for name, value in (particles.values | particles.buffers).items():
        torch.testing.assert_close(value, stack[name], rtol=0, atol=0)
    assert len(others) == held * len(list(model.parameters()))


def test_a_model_gets_its_tensors_back_after_an_error():
    model, x = Tied(), torch.randn(5, 7)
    own = dict(model.named_parameters())
    with pytest.raises(RuntimeError), torch.no_grad():
        passes(model, networks_of(particles_of(model), range(4), model), lambda: iter([x]))
    assert all(model.get_parameter(name) is tensor for name, tensor in own.items())
    assert model.second.weight is model.first.weight


def test_only_a_tensor_that_nobody_else_has_is_exchanged():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    known = model[0].weight
    with lent(model) as (own, put):
        put({name: torch.zeros_like(tensor) for name, tensor in own.items()})
        assert model[0].weight is known
        assert not known.any()
        assert not isinstance(model[1].weight, nn.Parameter)
    assert known.any()
    assert isinstance(model[1].weight, nn.Parameter)


@pytest.fixture
def kept():
    """A network with norms, its particles, and a check that predictions are those of each network alone."""
    torch.manual_seed(0)
    bnn, check = checked_ensemble(Asking(), torch.randn(300, 1, 8, 8))
    check()
    assert len(module._kept[bnn.posterior_].networks) == 4
    return bnn, check


def test_kept_networks_see_what_changes_in_place(kept):
    bnn, check = kept
    bnn.posterior_.values["row.0.weight"].mul_(2)
    bnn.posterior_.buffers["row.1.running_var"].add_(1)
    check()
    check(samples=2)


def test_kept_networks_are_taken_anew_from_other_tensors_and_for_other_precisions(kept):
    bnn, check = kept
    bnn.posterior_.values["row.0.weight"] = torch.randn(4, 4, 1, 3, 3)
    check()
    bnn.double()
    check()
    assert not module._kept[bnn.posterior_].networks  # what was converted is not kept
    bnn.posterior_.values["row.0.weight"].mul_(2)
    check()


def test_statistics_of_norms_are_not_copied_but_what_is_written_to_is():
    model = with_norm().eval()
    particles = particles_of(model)
    with lent(model) as (own, _):
        network = next(iter(networks_of(particles, [1], model)(own)))
        assert network["1.running_mean"].data_ptr() == particles.buffers["1.running_mean"][1].data_ptr()
        model[1].training = True
        network = next(iter(networks_of(particles, [1], model)(own)))
        assert network["1.running_mean"].data_ptr() != particles.buffers["1.running_mean"][1].data_ptr()


def test_no_more_is_kept_than_that(kept, monkeypatch):
    bnn, check = kept
    monkeypatch.setattr(module, "KEPT", 2 * len(bnn.posterior_.values | bnn.posterior_.buffers))
    bnn.state["posterior"] = particles_of(bnn.model)
    check()
    check()
    assert len(module._kept[bnn.posterior_].networks) == 2


def test_nothing_is_kept_alive(kept):
    bnn, _ = kept
    posterior, weight = weakref.ref(bnn.posterior_), weakref.ref(bnn.posterior_.values["row.0.weight"])
    bnn.state["posterior"] = particles_of(bnn.model)
    gc.collect()
    assert posterior() is None
    assert weight() is None


def test_networks_in_other_precisions_are_converted():
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    network = {name: torch.randn(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    with torch.no_grad():
        found = passes(model, converted([network]), lambda: iter([x]))
    fitting = {name: value.float() for name, value in network.items()}
    torch.testing.assert_close(found[0], functional_call(model, fitting, (x,)))


CONVOLUTIONS = [
    nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3)
    ),
    nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)),
    nn.Sequential(
        nn.Identity(), nn.Conv2d(2, 4, 3, padding="same", bias=False), nn.BatchNorm2d(4), nn.ELU(), nn.AvgPool2d(2),
        nn.Conv2d(4, 6, 3, 2, 1, groups=2), nn.BatchNorm2d(6, affine=False), nn.Dropout2d(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2),
    ),
    nn.Sequential(nn.Conv2d(2, 4, 3), nn.Sigmoid(), nn.Conv2d(4, 3, 1)),
]  # fmt: skip
SERIES = [
    nn.Sequential(
        nn.Conv1d(2, 4, 3, dilation=2), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(4, 6, 3, 2, 1, groups=2),
        nn.BatchNorm1d(6), nn.Dropout1d(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4),
        nn.ReLU(), nn.Linear(4, 2),
    ),
    nn.Sequential(nn.Conv1d(2, 4, 3, padding="same", bias=False), nn.GELU(), nn.AvgPool1d(2), nn.Conv1d(4, 3, 1)),
    nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.MaxPool2d(3, 1, 1), nn.Flatten(), nn.Linear(96, 2)),  # of channels
    nn.Sequential(nn.ConstantPad1d(1, 0.0), nn.Conv1d(2, 4, 3), nn.LayerNorm(32), nn.Conv1d(4, 2, 1)),
]  # fmt: skip


@pytest.mark.parametrize("model", CONVOLUTIONS + SERIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_networks_with_convolutions_are_called_abreast_on_few_inputs(model, dtype, monkeypatch):
    x = torch.randn(7, 2, 8, 8) if model in CONVOLUTIONS else torch.randn(7, 2, 32)
    bnn = bl.bayesianize(model.eval(), bl.DeepEnsemble(4), likelihood=bl.likelihoods.Gaussian())
    posterior = particles_of(model)
    posterior = Particles({n: v.to(dtype) for n, v in posterior.values.items()}, buffers=posterior.buffers)
    bnn.state["posterior"] = posterior
    known = not any(isinstance(layer, (nn.ZeroPad2d, nn.ConstantPad1d)) for layer in model) and model is not SERIES[2]
    if known:
        monkeypatch.setattr(predicting, "passes", None)
    for numbers in (2**17, 2 * x.numel()):  # all at once, and two at a time
        monkeypatch.setattr(predicting, "MAPS", {"cpu": numbers})
        for _ in range(2):
            found = bl.predict(bnn, x, batch_size=4).samples
            assert found.is_contiguous()
            for k in range(4):
                close(found[k], alone(model, posterior, k, x))
            posterior.values[next(iter(posterior.values))].mul_(1.5)  # which is seen


@pytest.mark.parametrize("examples", [1, 5, 400])
@pytest.mark.parametrize("bias", [True, False])
def test_a_network_may_be_but_a_linear_layer(examples, bias, monkeypatch):
    monkeypatch.setattr(predicting, "passes", None)
    bnn, check = checked_ensemble(nn.Linear(6, 2, bias=bias), torch.randn(examples, 6))
    for _ in range(3):
        check()
    bnn.posterior_.values["weight"].mul_(2)
    check()
    check(1)


def one_more(layer, x):
    return nn.Linear.forward(layer, x) + 1


def test_a_layer_that_is_a_network_is_not_kept_and_seen_to_be_changed():
    x = torch.randn(5, 6)
    bnn, check = checked_ensemble(nn.Linear(6, 2), x)
    check()
    vars(bnn.model)["forward"] = partial(one_more, bnn.model)
    outputs = bl.predict(bnn, x).samples
    del vars(bnn.model)["forward"]
    torch.testing.assert_close(outputs, bl.predict(bnn, x).samples + 1)
    model = weakref.ref(bnn.model)
    del bnn, check
    gc.collect()
    assert model() is None


def test_norms_whose_settings_change_are_seen():
    torch.manual_seed(0)
    for model, x in ((SERIES[0], torch.randn(3, 2, 32)), (CONVOLUTIONS[2], torch.randn(3, 2, 8, 8))):
        bnn, check = checked_ensemble(copy.deepcopy(model), x)
        for eps in (1e-5, 1.0):
            for layer in bnn.model:
                if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
                    layer.eps = eps
            check()


def test_one_example_without_a_batch_is_normed_as_by_the_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 5, 3, padding=1), nn.BatchNorm1d(5))
    _, check = checked_ensemble(model, torch.randn(3, 5))
    for _ in range(2):
        check()


class OfEight(nn.Module):
    """Takes eight examples, no more and no fewer."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 1), nn.Linear(6, 2)

    def forward(self, x):
        return self.other(torch.relu(self.one(x).expand(8, 6)))


def test_networks_of_a_fixed_number_of_examples():
    _, check = checked_ensemble(OfEight(), torch.randn(8, 6))
    for _ in range(2):
        check()


def test_convolutions_of_which_a_part_is_random_are_called_abreast(monkeypatch):
    model, x = CONVOLUTIONS[0], torch.randn(3, 2, 8, 8)
    bnn = bl.bayesianize(model, bl.DeepEnsemble(2), likelihood=bl.likelihoods.Gaussian())
    monkeypatch.setattr(predicting, "passes", None)
    for names in (["0.weight"], ["0.bias", "4.weight"], ["4.weight", "4.bias", "6.bias"]):
        bnn.state["posterior"] = Particles({name: torch.randn(3, *model.get_parameter(name).shape) for name in names})
        for k, found in enumerate(bl.predict(bnn, x).samples):
            torch.testing.assert_close(found, alone(model, bnn.posterior_, k, x))


def test_convolutions_go_one_by_one_for_many_inputs_with_hooks_and_for_one_image(monkeypatch):
    model = copy.deepcopy(CONVOLUTIONS[0])
    bnn = bl.bayesianize(model, bl.DeepEnsemble(2), likelihood=bl.likelihoods.Gaussian())
    bnn.state["posterior"] = particles_of(model)
    calls = []

    def recorded(*args):
        calls.append(len(args[0]))
        return outputs_of(*args)

    monkeypatch.setattr(predicting, "outputs_of", recorded)
    x = torch.randn(3, 2, 8, 8)
    bl.predict(bnn, x)
    assert not calls
    bl.predict(bnn, torch.randn(100, 2, 8, 8))
    bl.predict(bnn, x, samples=1)
    assert calls == [4, 1]
    seen = []
    bnn.model[1].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    bl.predict(bnn, x)
    assert calls == [4, 1]
    assert seen == [3] * 4


@pytest.mark.parametrize("examples", [3, 300])
def test_a_layer_whose_weight_is_no_parameter_is_called_as_it_is(examples):
    """Such as one that was fixed: a buffer, or an attribute, in the place of a parameter."""
    model = copy.deepcopy(CONVOLUTIONS[2])
    for layer, leaf in ((model[1], "weight"), (model[2], "bias"), (model[10], "weight")):
        value = getattr(layer, leaf).detach()
        delattr(layer, leaf)
        layer.register_buffer(leaf, value)
    custom = nn.Sequential()
    custom.add_module("row", model)
    for network in (model, custom):
        bnn = bl.bayesianize(network.eval(), bl.DeepEnsemble(4), likelihood=bl.likelihoods.Gaussian())
        bnn.state["posterior"] = particles_of(bnn.model)
        x = torch.randn(examples, 2, 8, 8)
        for k, found in enumerate(bl.predict(bnn, x).samples):
            close(found, alone(bnn.model, bnn.posterior_, k, x))
