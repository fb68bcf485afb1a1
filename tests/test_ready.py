"""Particles made ready: the next prediction is the same, and what changes in between is seen."""

from __future__ import annotations

import gc
import importlib
import weakref

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim import ready as module
from oracles import Residual, checked_ensemble, particles_of


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.slope = nn.Linear(6, 5), nn.Linear(5, 3), 0.3

    def forward(self, x):
        return self.last(nn.functional.leaky_relu(self.first(x.flatten(1)), self.slope))


def row():
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.fixture
def is_used(monkeypatch):
    """Whether a prediction from some network is ready: it is, if nothing is found out."""
    predict = importlib.import_module("bayeslim.predict")
    found_out = []
    unrolled = predict.unrolled
    monkeypatch.setattr(predict, "unrolled", lambda *given: found_out.append(1) or unrolled(*given))

    def used(predicted):
        found_out.clear()
        predicted()
        return not found_out

    return used


@pytest.fixture(params=[(row, (7, 2, 3)), (Written, (7, 2, 3)), (Residual, (7, 1, 4, 4))], ids=["row", "rows", "twins"])
def made(request):
    torch.manual_seed(0)
    build, shape = request.param
    bnn, check = checked_ensemble(build(), torch.randn(shape))
    check()
    return bnn, check


def test_what_was_found_out_once_is_used_in_any_mode(made, is_used):
    bnn, check = made
    assert is_used(check)
    bnn.train()
    assert is_used(check)
    assert bnn.model.training
    bnn.eval()
    assert is_used(check)
    assert not is_used(lambda: check(samples=2))
    assert is_used(check)


def test_what_was_found_out_once_is_used_in_any_mode_of_a_part(made, is_used):
    bnn, check = made
    part = [*bnn.model.modules()][-1]
    for modes in ((True, False), (False, True)):
        bnn.model.training, part.training = modes
        assert is_used(check)
        assert (bnn.model.training, part.training) == modes


def test_nothing_is_dropped_in_training_mode(is_used):
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.Linear(6, 5), nn.Dropout(0.9), nn.ReLU(), nn.Linear(5, 3))
    bnn, check = checked_ensemble(model, torch.randn(7, 2, 3))
    check()
    bnn.train()
    assert is_used(check)


@pytest.mark.parametrize("likelihood", [bl.likelihoods.Categorical(), bl.likelihoods.Gaussian()])
@pytest.mark.parametrize("some", [False, True])
def test_nothing_that_is_predicted_has_a_gradient(likelihood, some, is_used):
    torch.manual_seed(0)
    bnn, _ = checked_ensemble(row(), torch.randn(7, 2, 3))
    bnn.likelihood = likelihood
    if some:  # what is not random is the model's own, with gradients
        particles = bnn.posterior_
        bnn.state["posterior"] = bl.posteriors.Particles({k: v for k, v in particles.values.items() if k[0] == "3"})
    x = torch.randn(7, 2, 3, requires_grad=True)
    first = bl.predict(bnn, x)
    assert is_used(lambda: bl.predict(bnn, x))
    again = bl.predict(bnn, x)
    for prediction in (first, again):
        tensors = (prediction.mean, prediction.samples, prediction.aleatoric, prediction.epistemic, prediction.variance)
        assert not any(tensor.requires_grad for tensor in tensors)
    torch.testing.assert_close(first.samples, again.samples)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("kind", ["values", "buffers"])
def test_particles_that_change_are_seen(made, is_used, kind):
    bnn, check = made
    stack = getattr(bnn.posterior_, kind)
    for name in [name for name, value in stack.items() if value.is_floating_point()]:
        stack[name].mul_(1.5)
        assert not is_used(check)
        stack[name] = stack[name] * 0.7
        assert not is_used(check)
        assert is_used(check)
    bnn.state["posterior"] = particles_of(bnn.model, 4)
    assert not is_used(check)


def test_hooks_precisions_and_layers_that_are_put_in_are_seen(made, is_used):
    bnn, check = made
    calls = []
    layer = [m for m in bnn.model.modules() if isinstance(m, nn.Linear)][-1]
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    assert not is_used(check)
    assert calls
    handle.remove()
    check()
    bnn.double()
    assert not is_used(check)
    bnn.float()
    check()
    layer.forward = lambda x: 2 * x[:, :1]
    assert not is_used(check)


def test_an_attribute_that_a_forward_reads_is_seen(is_used):
    bnn, check = checked_ensemble(Written(), torch.randn(7, 2, 3))
    bnn.posterior_.values["first.bias"].sub_(3)
    check()
    bnn.model.slope = 0.9
    assert not is_used(check)
    assert is_used(check)


def test_settings_of_all_networks_are_seen(made, is_used):
    bnn, check = made
    kind = next(iter(module._ready[bnn.posterior_].ways))
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_used(lambda: bl.predict(bnn, torch.rand(kind[0])))
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    assert not is_used(check)
    handle.remove()
    assert is_used(check)


def test_only_inputs_of_the_same_kind_are(is_used):
    bnn = checked_ensemble(row(), torch.randn(7, 2, 3))[0]
    x = torch.rand(7, 6)
    for inputs in (x, x[:5], torch.rand(7, 3, 2), bl.data.Loader(x, x, batch_size=5), (x,)):
        assert not is_used(lambda: bl.predict(bnn, inputs))  # noqa: B023 - called at once
    assert is_used(lambda: bl.predict(bnn, x))
    assert is_used(lambda: bl.predict(bnn, x[:5]))
    assert not is_used(lambda: bl.predict(bnn, x, batch_size=3))
    assert len(bl.predict(bnn, x, how="mean").samples) == 1
    assert is_used(lambda: bl.predict(bnn, x))
    with pytest.raises(bl.errors.ShapeMismatch, match="takes 6 features"):
        bl.predict(bnn, torch.rand(7, 5))


def test_inputs_in_several_parts_and_too_many_kinds_are_not(monkeypatch, is_used):
    monkeypatch.setattr(module, "KINDS", 2)
    bnn = checked_ensemble(row(), torch.randn(7, 2, 3))[0]
    x = torch.rand(20_000, 6)
    for _ in range(2):
        bl.predict(bnn, x, batch_size=None)
    assert not is_used(lambda: bl.predict(bnn, x))
    assert bnn.posterior_ not in module._ready
    for examples in (3, 4, 5):
        bl.predict(bnn, x[:examples])
    assert [is_used(lambda: bl.predict(bnn, x[:n])) for n in (3, 4, 5)] == [True, True, False]  # noqa: B023


def test_another_method_of_the_same_particles_is_asked(is_used):
    bnn, check = checked_ensemble(row(), torch.randn(7, 2, 3))
    check()
    bnn.method = bl.Snapshot()
    assert not is_used(check)
    assert is_used(check)


@pytest.mark.parametrize("likelihood", [bl.likelihoods.Categorical(), bl.likelihoods.Gaussian()])
def test_all_that_is_predicted_lies_in_memory_as_it_is_numbered(likelihood):
    bnn = checked_ensemble(row(), torch.randn(7, 2, 3))[0]
    bnn.likelihood = likelihood
    for _ in range(2):
        prediction = bl.predict(bnn, torch.rand(700, 6))
        tensors = prediction.samples, prediction.mean, prediction.variance, prediction.epistemic
        assert all(tensor.is_contiguous() for tensor in tensors)


def test_nothing_is_left_of_particles_that_are_gone(made):
    bnn, _ = made
    posterior = weakref.ref(bnn.posterior_)
    tensor = weakref.ref(next(iter(bnn.posterior_.values.values())))
    assert posterior() in module._ready
    del bnn.state["posterior"]
    gc.collect()
    assert posterior() is None
    assert tensor() is None
