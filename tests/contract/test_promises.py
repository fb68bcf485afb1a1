"""Every method keeps every promise."""

from __future__ import annotations

import copy
import functools
import random

import numpy as np
import pytest
import torch
from method_table import A_THIRD, METHODS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl

X, Y = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3


class Net(nn.Module):
    """A little of everything: layers with local noise, norms, dropout, and a weight its parent reads."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(torch.relu(self.norm(self.conv(x)))).flatten(2).transpose(1, 2)
        return self.head(self.attention(h, h, h, need_weights=False)[0].mean(1))


@pytest.fixture(params=METHODS)
def method(request) -> bl.Method:
    return METHODS[request.param]()


@pytest.fixture(params=A_THIRD)
def some_method(request) -> bl.Method:
    """One method of each kind, for promises that need fits of their own."""
    return METHODS[request.param]()


@pytest.fixture(params=METHODS)
def a_fit(request) -> bl.Bayesian:
    """A copy of a network that every method fits once."""
    return copy.deepcopy(fitted_once(request.param))


@functools.cache
def fitted_once(name: str) -> bl.Bayesian:
    return fitted(METHODS[name]())


def bayesian(method: bl.Method, model: nn.Module | None = None) -> bl.Bayesian:
    model = Net() if model is None else model
    return bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical(), num_data=len(X))


def loader() -> DataLoader:
    return DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)


def fitted(method: bl.Method, **options) -> bl.Bayesian:
    torch.manual_seed(3)
    bnn = bayesian(method)
    bnn.fit(loader(), epochs=1, seed=7, **options)
    return bnn


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def ask_for_evidence(bnn: bl.Bayesian, data, **options) -> None:
    # particles and points have no density, nor have scales with an improper prior, and so no evidence
    gate = getattr(bnn.method, "gates", None)
    if isinstance(bnn.posterior_, bl.posteriors.Particles) or (gate is not None and not gate.is_proper):
        with pytest.raises(bl.errors.BayeslimError):
            bl.log_evidence(bnn, data, samples=2, **options)
    else:
        bl.log_evidence(bnn, data, samples=2, **options)


def random_states() -> tuple:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


@pytest.mark.parametrize("after_forward", [False, True])
def test_deepcopy_is_equal_and_independent(method, after_forward):
    bnn = bayesian(method)
    if after_forward:
        bnn.loss((X, Y)).backward()
    twin = copy.deepcopy(bnn)
    assert_same_state(bnn, twin)
    losses = []
    for one in (bnn, twin):
        torch.manual_seed(0)
        losses.append(one.loss((X, Y)).item())
    assert losses[0] == losses[1]
    before = copy.deepcopy(bnn.state_dict())
    optimizer = twin.optimizer(0.1)
    twin.loss((X, Y)).backward()
    optimizer.step()
    assert twin.step == 1
    assert bnn.step == 0
    now = bnn.state_dict()
    learned = [name for name, _ in bnn.model.named_parameters()]
    assert all(torch.equal(before[name], now[name]) for name in learned)
    moved = "head.weight" if twin.model.head.weight.requires_grad else "head.weight_log_std"  # variance networks
    assert not torch.equal(now[moved], twin.state_dict()[moved])


def test_save_and_load_give_the_same_network(a_fit, tmp_path):
    bnn = a_fit
    bl.save(bnn, tmp_path / "bnn")
    again = bl.load(tmp_path / "bnn", model=Net())
    assert_same_state(bnn, again)
    assert again.method == bnn.method
    assert again.sites == bnn.sites
    assert (again.num_data, again.step, again.steps_per_epoch) == (bnn.num_data, bnn.step, bnn.steps_per_epoch)
    draws = [bl.predict(one, X, samples=3, generator=torch.Generator().manual_seed(2)).samples for one in (bnn, again)]
    assert torch.equal(*draws)
    losses = []
    for one in (bnn.train(), again.train()):
        torch.manual_seed(0)
        losses.append(one.loss((X, Y)).item())
    assert losses[0] == losses[1]


def test_the_users_names_are_kept(method):
    plain = Net()
    names = set(plain.state_dict())
    bnn = bayesian(method, plain)
    assert names <= set(bnn.state_dict())
    assert not any(name.startswith(("model.", "bnn.", "module.")) for name in bnn.state_dict())
    other = Net()
    report = bnn.load_state_dict(other.state_dict(), strict=False)
    assert not report.unexpected_keys
    assert not names & set(report.missing_keys)
    for name, value in other.state_dict().items():
        assert torch.equal(bnn.state_dict()[name], value), name


def test_the_mean_network_is_the_users(a_fit):
    plain, mean = Net(), a_fit.mean_network()
    mean.load_state_dict(plain.state_dict())
    assert [type(m) for m in mean.modules()] == [type(m) for m in plain.modules()]


def test_names_also_hold_when_nested_in_another_module(method):
    outer = nn.ModuleDict({"bnn": bayesian(method)})
    other = nn.ModuleDict({"bnn": bayesian(method)})
    other.load_state_dict(outer.state_dict())
    assert_same_state(outer, other)
    assert "bnn.head.weight" in outer.state_dict()


def test_evaluation_is_the_mean_network_and_repeats(a_fit):
    bnn = a_fit.eval()
    first, second = bnn(X), bnn(X)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, bnn.mean_network().eval()(X))
    if getattr(bnn.method, "stands_at", "mean") == "last":  # networks apart from each other, whose mean is none
        torch.testing.assert_close(first, bl.predict(bnn, X).samples[-1])
    bnn.train()
    assert not torch.equal(bnn(X), bnn(X))


def test_modes_never_change_weights(method):
    bnn = bayesian(method)
    bnn.loss((X, Y))
    before = copy.deepcopy(dict(bnn.named_parameters()))
    bnn.eval().train().eval()
    assert before.keys() == dict(bnn.named_parameters()).keys()
    assert all(torch.equal(before[name], p) for name, p in bnn.named_parameters())


@pytest.mark.parametrize("name", A_THIRD)
def test_the_same_seed_gives_the_same_bits(name):
    assert_same_state(fitted_once(name), fitted(METHODS[name]()))


def test_a_seed_leaves_the_global_random_state_alone(some_method):
    method = some_method
    bnn = bayesian(method)
    before = random_states()
    bnn.fit(loader(), epochs=1, seed=1)
    assert random_states() == before


def test_the_users_model_stays_as_it_was(some_method):
    method = some_method
    model = Net().eval()
    model.conv.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    bnn = bayesian(method, model)
    bnn.fit(loader(), epochs=1)
    bl.predict(bnn, X, samples=2)
    ask_for_evidence(bnn, loader())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert [type(m) for m in model.modules()] == [type(m) for m in Net().modules()]
    assert not any(m.training for m in model.modules())
    assert [p.requires_grad for p in model.conv.parameters()] == [False, False]
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "head.weight")
    assert len(model.head._forward_hooks) == 1
    assert not calls or bnn.model.head is not model.head


def test_looking_leaves_no_trace(a_fit):
    """Prediction and evidence change neither gradients, modes, buffers nor the global random state."""
    bnn = a_fit.train()
    bnn.model.norm.eval()
    modes = [m.training for m in bnn.modules()]
    state = copy.deepcopy(bnn.state_dict())
    before = random_states()
    generator = torch.Generator().manual_seed(0)
    bl.predict(bnn, X, samples=2, generator=generator)
    assert random_states() == before
    ask_for_evidence(bnn, [(X, Y)], generator=generator)
    assert random_states() == before
    bl.predict(bnn, X, how="mean")
    assert [m.training for m in bnn.modules()] == modes
    assert all(p.grad is None for p in bnn.parameters())
    assert all(torch.equal(state[name], value) for name, value in bnn.state_dict().items())


def test_in_place_conversion_keeps_the_very_parameters(some_method):
    method = some_method
    model = Net()
    parameters = dict(model.named_parameters())
    bnn = bl.bayesianize_(model, method, likelihood=bl.likelihoods.Categorical(), num_data=len(X))
    assert bnn.model is model
    bnn.fit(loader(), epochs=1)
    now = dict(model.named_parameters())
    assert all(now[name] is p for name, p in parameters.items())


def test_bfloat16_autocast_trains_and_agrees_with_full_precision(some_method):
    method = some_method
    bnn = bayesian(method)
    bnn.loss((X, Y))  # settles which layers are noisy
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = bnn.loss((X, Y))
    low = bnn.terms
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in bnn.parameters())
    torch.manual_seed(0)
    bnn.loss((X, Y))
    # a Rényi bound weighs each draw's part of the KL by how well the draw, in low precision, fits the data
    alike = 1e-5 if getattr(method, "renyi", 1) == 1 else 0.02
    assert low.kl.item() == pytest.approx(bnn.terms.kl.item(), rel=alike)
    assert low.nll.item() == pytest.approx(bnn.terms.nll.item(), abs=0.5)
    bnn.fit(loader(), epochs=1, autocast=torch.bfloat16)
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in bnn.parameters())


def test_a_layer_that_never_runs_is_drawn_whole(some_method):
    method = some_method

    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    bnn = bayesian(method, Unused())
    bnn.loss((X, Y)).backward()
    assert all(torch.isfinite(p.grad).all() for name, p in bnn.named_parameters() if "spare.bias" not in name)
    bnn.fit(loader(), epochs=1)
    assert bnn.posterior_.sample()["spare.weight"].shape == (2, 2)


class Scaled(nn.Sequential):
    """The scale of its outputs is a parameter without dimensions."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.ReLU(), nn.Linear(4, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(x)


WITH_SCALARS = METHODS | {"laplace-full": lambda: bl.Laplace("full"), "laplace-lowrank": lambda: bl.Laplace("lowrank")}


@pytest.mark.parametrize("name", WITH_SCALARS)
def test_scalars_are_random_as_other_parameters_are(name):
    bnn = bl.bayesianize(Scaled(), WITH_SCALARS[name](), likelihood=bl.likelihoods.Categorical(), sites="all")
    bnn.fit(loader(), epochs=2, seed=7)
    assert torch.isfinite(bl.predict(bnn, X, samples=4).probs).all()
    ask_for_evidence(bnn, loader())
    if isinstance(bnn.method, bl.MCDropout):
        return
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.3), granularity="unit", example=X)
    assert torch.isfinite(bl.predict(pruned, X, samples=4, how="sample").probs).all()


def test_the_loss_is_in_one_scale(method):
    bnn = bayesian(method)
    loss = bnn.loss((X, Y))
    terms = bnn.terms
    assert loss.item() == pytest.approx(terms.nll.item() + terms.kl_weight * terms.kl.item() / len(X), rel=1e-5)
    assert bnn.loss((X, Y), kl_weight=0.0).item() == pytest.approx(bnn.terms.nll.item(), rel=1e-6)
    assert loss.ndim == 0
    assert not terms.nll.requires_grad
