"""A pass over the data leaves no trace on the user's model, also when it fails."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from curved_networks import make
from torch.utils.data import DataLoader, TensorDataset

from bayeslim.curvature import diag, ekfac, ggn, jacobian, kfac, kfra, lowrank


def passes():
    def corrected(model, loader, likelihood):
        return ekfac(model, loader, likelihood, kfac(model, loader, likelihood))

    return {
        "kfac": kfac,
        "reduce": lambda *args: kfac(*args, sharing="reduce", columns="sampled"),
        "ekfac": corrected,
        "diag": diag,
        "hutchinson": lambda *args: diag(*args, "hutchinson"),
        "ggn": lambda *args: ggn(*args, ["9.weight"]),
        "lowrank": lambda *args: lowrank(*args, 2),
    }


def traces(model):
    return (
        [module.training for module in model.modules()],
        [
            len(module._forward_hooks) + len(module._backward_hooks) + len(module._forward_pre_hooks)
            for module in model.modules()
        ],
        [p.requires_grad for p in model.parameters()],
        [p.grad is None for p in model.parameters()],
    )


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", passes())
def test_nothing_is_left_behind(name, context):
    case = make("convolutions and norms")
    model = case.model.train()
    model[1].eval()
    model[3].weight.requires_grad_(False)
    model[9].weight.grad = torch.ones_like(model[9].weight)
    model[0].register_forward_hook(lambda module, args, output: None)
    state = copy.deepcopy(model.state_dict())
    before, random = traces(model), torch.get_rng_state()
    loader = DataLoader(TensorDataset(case.x, case.y), batch_size=2, shuffle=True)
    with context():
        passes()[name](model, loader, case.likelihood)
    assert traces(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert bool((model[9].weight.grad == 1).all())
    assert torch.backends.mha.get_fastpath_enabled()
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


@pytest.mark.parametrize("name", passes())
def test_nothing_is_left_behind_after_an_error(name):
    case = make("convolutions and norms")
    model = case.model.train()
    before, random = traces(model), torch.get_rng_state()

    def broken():
        yield case.x[:2], case.y[:2]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        passes()[name](model, broken(), case.likelihood)
    assert traces(model) == before
    assert torch.equal(torch.get_rng_state(), random)


def test_jacobians_and_recursion_leave_nothing_either():
    case = make("mlp")
    model = case.model.train()
    before, random = traces(model), torch.get_rng_state()
    jacobian(model, case.x)
    kfra(model, case.batches(), case.likelihood)
    assert traces(model) == before
    assert torch.equal(torch.get_rng_state(), random)


def test_a_seed_repeats_and_another_differs():
    case = make("mlp")
    run = lambda seed: kfac(case.model, case.batches(), case.likelihood, seed=seed).layers["0.weight"].G  # noqa: E731
    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


@pytest.mark.parametrize("name", ["convolutions and norms", "words", "attention, time first", "segmentation", "tied"])
def test_memory_bounds_do_not_change_the_answer(name, monkeypatch):
    """With room for one example and two columns at a time, every pass goes in many small steps."""
    case = make(name)
    basis = kfac(
        case.model, case.batches(), case.likelihood
    )  # one for both: eigenvectors of equal eigenvalues are free

    def everything():
        kron = kfac(case.model, case.batches(), case.likelihood, columns="exact")
        reduced = kfac(case.model, case.batches(), case.likelihood, columns="exact", sharing="reduce")
        corrected = ekfac(case.model, case.batches(), case.likelihood, basis, columns="exact")
        return [
            *(layer.A for layer in (*kron.layers.values(), *reduced.layers.values())),
            *(factors.corrected for factors in corrected.values()),
            *diag(case.model, case.batches(), case.likelihood).values(),
            ggn(case.model, case.batches(), case.likelihood).matrix,
            jacobian(case.model, case.x),
        ]

    roomy = everything()
    monkeypatch.setattr("bayeslim.curvature.sweep.CPU_CHUNK_BYTES", 1)
    monkeypatch.setattr("bayeslim.curvature.example_gradients.COLUMNS_AT_ONCE", 2)
    for small, large in zip(everything(), roomy, strict=True):
        torch.testing.assert_close(small, large)


@pytest.mark.parametrize("name", ["convolutions and norms", "attention", "recurrent"])
def test_threads_measure_at_once(name):
    """While they do, the model is called in training mode, as somebody else's training would."""
    case = make(name)
    model = case.model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.0  # keeps its statistics while the model is called below
    before = traces(model)

    def measure(_):
        kron = kfac(model, case.batches(), case.likelihood, seed=1)
        squares = diag(model, case.batches(), case.likelihood)
        return [*(layer.G for layer in kron.layers.values()), *squares.values()]

    expected = measure(0)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(measure, n) for n in range(4)]
        while not all(future.done() for future in found):
            model(case.x)
            assert traces(model) == before
    for future in found:
        for one, other in zip(expected, future.result(), strict=True):
            torch.testing.assert_close(one, other)
    assert traces(model) == before


class Closed(torch.nn.Module):
    """A forward that calls a layer through a closure, past the module tree."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)
        inner = self.inner
        self.first = lambda x: torch.tanh(inner(x))

    def forward(self, x):
        return self.head(self.first(x))


def test_layers_behind_a_closure_have_their_curvature():
    torch.manual_seed(0)
    case, closed = make("mlp"), Closed().double()
    plain = torch.nn.Sequential(closed.inner, torch.nn.Tanh(), closed.head)
    expected = kfac(plain, case.batches(), case.likelihood, columns="exact").layers
    found = kfac(closed, case.batches(), case.likelihood, columns="exact").layers
    torch.testing.assert_close(found["inner.weight"].G, expected["0.weight"].G)
    torch.testing.assert_close(
        diag(closed, case.batches(), case.likelihood)["inner.weight"],
        diag(plain, case.batches(), case.likelihood)["0.weight"],
    )
