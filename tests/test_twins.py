"""Networks of particles that are kept as modules: they are what the particles and the model are now."""

from __future__ import annotations

import gc
import importlib
import weakref

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim import twins as module
from bayeslim.errors import UnsupportedModel
from bayeslim.fused import AtLeast
from bayeslim.posteriors import Particles
from bayeslim.twins import twins_of
from oracles import alone, checked_ensemble, particles_of


def with_norms():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4),
        nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2),
    )  # fmt: skip


@pytest.fixture
def kept():
    """A network with norms, its particles, and a check that predictions are those of each network alone."""
    torch.manual_seed(0)
    bnn, check = checked_ensemble(with_norms(), torch.randn(300, 1, 8, 8))
    check()
    assert len(module._kept[bnn.posterior_].modules) == 4
    return bnn, check


def test_norms_after_convolutions_are_scaled_into_them_and_the_rest_are_views(kept):
    bnn, _ = kept
    posterior = bnn.posterior_
    twin = module._kept[posterior].modules[2]
    assert [type(layer) for layer in twin].count(nn.BatchNorm2d) == 0
    assert twin[-1].weight.data_ptr() == posterior.values["9.weight"][2].data_ptr()
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in bnn.model) == 2


@pytest.mark.parametrize(
    ("kind", "name"), [("values", "0.weight"), ("values", "9.bias"), ("buffers", "1.running_var"), ("values", "4.bias")]
)
def test_what_changes_in_place_is_seen(kept, kind, name):
    bnn, check = kept
    getattr(bnn.posterior_, kind)[name].mul_(2)
    check()
    check(samples=2)


def test_other_tensors_and_other_precisions_are_seen(kept):
    bnn, check = kept
    bnn.posterior_.values["0.weight"] = torch.randn(4, 4, 1, 3, 3)
    check()
    bnn.double()
    check()
    assert twins_of(bnn.posterior_, [0], bnn.model) is None
    bnn.float()
    check()
    assert twins_of(bnn.posterior_, [0], bnn.model.eval()) is not None


def test_what_changes_in_the_model_is_seen(kept):
    bnn, check = kept
    bnn.model[4].eps = 3.0
    check()
    bnn.model[2] = nn.Tanh()
    check()
    bnn.model[0].padding, bnn.model[3].dilation = (1, 1), (2, 2)
    check()
    calls = []
    handle = bnn.model[6].register_forward_hook(lambda *_: calls.append(1))
    check()
    assert len(calls) == 8  # half of them by what it is compared with
    handle.remove()
    bnn.model[9].forward = lambda x: x[:, :2] * 7
    check()


def test_nothing_is_kept_of_networks_that_write_to_buffers_or_that_the_particles_are_a_part_of(kept):
    bnn, _ = kept
    posterior, model = bnn.posterior_, bnn.model.eval()
    before = {name: value.clone() for name, value in posterior.buffers.items()}
    assert twins_of(Particles({"0.weight": posterior.values["0.weight"]}), [0], model) is None
    model[1].train()
    assert twins_of(posterior, [0], model) is None
    model[1].eval()
    with torch.inference_mode():
        inside = Particles({n: v.clone() for n, v in posterior.values.items()}, buffers=posterior.buffers)
    assert twins_of(inside, [0], model) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert twins_of(posterior, [0], model) is None
    assert twins_of(posterior, [0], model) is not None
    assert all(torch.equal(value, before[name]) for name, value in posterior.buffers.items())


def test_norms_are_not_scaled_into_many_weights(kept, monkeypatch):
    bnn, check = kept
    monkeypatch.setattr(module, "SCALED", 100)
    bnn.state["posterior"] = particles_of(bnn.model)
    check()
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in module._kept[bnn.posterior_].modules[0])


def test_no_more_is_kept_than_that(kept, monkeypatch):
    bnn, check = kept
    monkeypatch.setattr(module, "KEPT", 4 * len(bnn.posterior_.values | bnn.posterior_.buffers) - 1)
    bnn.state["posterior"] = particles_of(bnn.model)
    check()
    assert bnn.posterior_ not in module._kept


def test_a_convolution_that_stands_twice_has_the_norm_of_each_place():
    shared = nn.Conv2d(2, 2, 1)
    model = nn.Sequential(shared, nn.BatchNorm2d(2), shared, nn.BatchNorm2d(2), shared, nn.Flatten()).eval()
    particles, x = particles_of(model, 2), torch.randn(3, 2, 2, 2)
    for k, twin in enumerate(twins_of(particles, [0, 1], model)):
        with torch.no_grad():
            torch.testing.assert_close(twin(x), alone(model, particles, k, x))


def dense(*between):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.ReLU(inplace=True), nn.Linear(4, 4),
        nn.ReLU(), nn.Linear(4, 3), *between, nn.Linear(3, 2, bias=False),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("between", [(), (nn.ReLU(),), (nn.Tanh(),), (nn.ReLU(), nn.Linear(3, 3), nn.ReLU())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_biases_are_moved_behind_rectifiers(between, dtype, monkeypatch):
    monkeypatch.setattr(module, "IS_ARM", False)
    torch.manual_seed(0)
    model = dense(*between).to(dtype)
    particles, x = particles_of(model, 2), torch.randn(3, 2, 3, dtype=dtype)
    for values in particles.values.values():
        values.mul_(0.3)  # biases add up from layer to layer
    before = {name: value.clone() for name, value in particles.values.items()}
    for k, twin in enumerate(twins_of(particles, [0, 1], model)):
        moved = 0 if dtype == torch.bfloat16 else 3 + sum(isinstance(layer, nn.ReLU) for layer in between)
        assert sum(isinstance(layer, AtLeast) for layer in twin) == moved
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(twin(x), alone(model, particles, k, x))
    assert all(torch.equal(value, before[name]) for name, value in particles.values.items())


@pytest.mark.parametrize("bias", [-1e6, 1e6, -torch.inf, torch.nan])
def test_large_biases_stay_where_they_are(bias, monkeypatch):
    monkeypatch.setattr(module, "IS_ARM", False)
    torch.manual_seed(0)
    model = dense()
    particles, x = particles_of(model, 2), torch.randn(3, 2, 3)
    particles.values["1.bias"][0, 2] = bias
    first, second = twins_of(particles, [0, 1], model)
    assert not isinstance(first[2], AtLeast)
    assert isinstance(second[2], AtLeast)
    with torch.no_grad():
        torch.testing.assert_close(first(x), alone(model, particles, 0, x), equal_nan=True)


def test_biases_are_moved_in_every_place_of_a_layer_that_stands_twice(monkeypatch):
    monkeypatch.setattr(module, "IS_ARM", False)
    torch.manual_seed(0)
    shared, relu = nn.Linear(3, 3), nn.ReLU()
    model = nn.Sequential(shared, relu, shared, relu, nn.Linear(3, 3), relu, shared).eval()
    particles, x = particles_of(model, 2), torch.randn(5, 3)
    for k, twin in enumerate(twins_of(particles, [0, 1], model)):
        with torch.no_grad():
            torch.testing.assert_close(twin(x), alone(model, particles, k, x))


def test_nothing_is_kept_alive(kept):
    bnn, _ = kept
    posterior, weight = weakref.ref(bnn.posterior_), weakref.ref(bnn.posterior_.values["0.weight"])
    bnn.state["posterior"] = particles_of(bnn.model)
    gc.collect()
    assert posterior() is None
    assert weight() is None


def test_outputs_that_are_no_tensor_are_refused():
    _bnn, check = checked_ensemble(nn.Sequential(nn.LSTM(3, 2, batch_first=True)), torch.randn(4, 5, 3))
    with pytest.raises(UnsupportedModel, match="must return a tensor"):
        check()


class Viewed(nn.Module):
    """Reads values as they lie in memory, so that another layout would be an error."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        h = self.conv(x)
        return self.head((h.view(h.shape[0], 4, 36) + 1).mean(2))


class Shortcut(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.head(x + nn.functional.gelu(self.second(x)).abs())


def series_row():
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(8, 2))


@pytest.mark.parametrize("is_arm", [False, True])
@pytest.mark.parametrize("examples", [3, 30])
def test_series_are_laid_out_for_convolutions_on_arm(examples, is_arm, monkeypatch):
    monkeypatch.setattr(module, "IS_ARM", is_arm)
    monkeypatch.setitem(importlib.import_module("bayeslim.predict").FEW, "cpu", 0)  # else they go at once
    torch.manual_seed(0)
    x = torch.randn(examples, 3, 9)
    bnn, check = checked_ensemble(series_row(), x)
    for _ in range(3):
        check()
    row = module.twins_of(bnn.posterior_, range(4), bnn.model.eval())[0]
    assert module.laid_out(x, row).mT.is_contiguous() == (is_arm and examples >= module.IMAGES)


def images_row():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3), nn.ReLU(),
        nn.Linear(3, 2),
    )  # fmt: skip


@torch.fx.wrap
def somebodys(x):
    return x.view(len(x), -1)


class Wrapped(nn.Module):
    """Calls a function that is not looked into."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(144, 2)

    def forward(self, x):
        return self.head(somebodys(self.conv(x) + 1))


@pytest.mark.parametrize(
    ("build", "is_laid_out"), [(images_row, True), (Shortcut, True), (Viewed, False), (Wrapped, False)]
)
@pytest.mark.parametrize("size", [None, 12])
def test_images_are_laid_out_for_convolutions_where_nobody_asks(build, is_laid_out, size, monkeypatch):
    monkeypatch.setitem(importlib.import_module("bayeslim.predict").FEW, "cpu", 0)  # else they go at once
    given = []
    laid_out = module.laid_out
    monkeypatch.setattr(module, "laid_out", lambda *args: given.append(laid_out(*args)) or given[-1])
    torch.manual_seed(0)
    x = torch.randn(30, 3, 8, 8)
    bnn = checked_ensemble(build(), x)[0]
    for _ in range(2):
        samples = bl.predict(bnn, x, batch_size=size).samples
        for k, found in enumerate(samples):
            torch.testing.assert_close(found, alone(bnn.model, bnn.posterior_, k, x), rtol=1e-4, atol=1e-4)
        assert samples.is_contiguous()
    few = [part for part in given if len(part) < module.IMAGES]
    many = [part for part in given if len(part) >= module.IMAGES]
    assert len(few) == (0 if size is None else len(given) // 3)
    assert all(part.is_contiguous() for part in few)
    assert all(part.is_contiguous(memory_format=torch.channels_last) == is_laid_out for part in many)
    assert many


@pytest.mark.parametrize(
    ("first", "x"),
    [
        (nn.Linear(8, 8), torch.zeros(9, 3, 8, 8)),  # not by products
        (nn.Conv2d(1, 2, 3), torch.zeros(9, 1, 8, 8)),  # one channel lies either way
        (nn.Conv2d(3, 2, 3).double(), torch.zeros(9, 3, 8, 8, dtype=torch.float64)),
        (nn.Conv2d(3, 2, 3), torch.zeros(9, 3, 8, 8, device="meta")),
        (nn.Conv2d(3, 2, 3), (torch.zeros(9, 3, 8, 8),)),
    ],
)
def test_what_would_not_gain_is_left_as_it_is(first, x):
    assert module.laid_out(x, nn.Sequential(first)) is x


def test_images_for_drawn_networks_are_laid_out_unless_somebody_looks_on(monkeypatch):
    torch.manual_seed(0)
    bnn = bl.bayesianize(images_row(), bl.Variational(), likelihood=bl.likelihoods.Categorical())
    x = torch.randn(30, 3, 8, 8)
    given = []
    laid_out = module.laid_out
    monkeypatch.setattr(
        importlib.import_module("bayeslim.predict"), "laid_out", lambda *a: given.append(laid_out(*a)) or given[-1]
    )

    def samples():
        return bl.predict(bnn, x, 3, "sample", generator=torch.Generator().manual_seed(1)).samples

    found = samples()
    assert given
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in given)
    seen = []
    bnn.model[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].view(-1)))
    given.clear()
    torch.testing.assert_close(samples(), found)
    assert seen
    assert not given
