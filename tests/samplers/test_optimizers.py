"""Samplers as optimizers: plain ones at temperature zero, exactly resumed, quiet where nothing may move."""

from __future__ import annotations

import copy

import pytest
import torch
from scipy import stats
from torch import nn

from bayeslim.samplers import Langevin, PreconditionedLangevin, Sampler, StochasticHamiltonian, Thermostat

KINDS = {
    "sgld": (Langevin, {}),
    "psgld": (PreconditionedLangevin, {"adapt_steps": 5}),
    "sghmc": (StochasticHamiltonian, {}),
    "sghmc-adapted": (StochasticHamiltonian, {"adapt_steps": 5}),
    "sgnht": (Thermostat, {}),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def step(model: nn.Module, sampler: torch.optim.Optimizer) -> None:
    sampler.zero_grad()
    model(torch.ones(4, 3)).square().mean().backward()
    sampler.step()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for first, second in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(first, second)


def test_a_run_is_resumed_exactly(kind):
    build, settings = kind
    model = network()
    sampler = build(model.parameters(), 0.1, num_data=10, **settings)
    for _ in range(3):
        step(model, sampler)
    half, state, random = copy.deepcopy(model), copy.deepcopy(sampler.state_dict()), torch.get_rng_state()
    for _ in range(4):  # the scales stop being measured in here
        step(model, sampler)
    again = build(half.parameters(), 0.1, num_data=10, **settings)
    again.load_state_dict(state)
    torch.set_rng_state(random)
    for _ in range(4):
        step(half, again)
    assert_same(model, half)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_without_temperature_it_is_gradient_descent(momentum):
    models = [network(), network()]
    plain = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=momentum)
    settings = {"num_data": 10, "temperature": 0.0}
    params = models[1].parameters()
    sampler = (
        StochasticHamiltonian(params, 0.1, friction=1 - momentum, **settings)
        if momentum
        else Langevin(params, 0.1, **settings)
    )
    for _ in range(5):
        for model, optimizer in zip(models, (plain, sampler), strict=True):
            step(model, optimizer)
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("temperature", [0.0, 1e-22])
def test_momentum_is_as_documented_while_the_rate_changes(temperature):
    """v ← (1 − α) v − lr ∇L, w ← w + v, where each step has a rate of its own, and some have none."""
    w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    sampler = StochasticHamiltonian([w], 0.1, num_data=10, friction=0.3, temperature=temperature)
    position, velocity = w.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for rate in (0.0, 0.1, 0.4, 1e-9, 0.0, 0.2, 0.3):
        sampler.param_groups[0]["lr"] = rate
        w.grad = 3 * w.detach()
        velocity = 0.7 * velocity - rate * 3 * position
        position = position + velocity
        sampler.step()
        torch.testing.assert_close(w.detach(), position)


def test_a_parameter_that_has_no_gradient_for_a_step_keeps_its_velocity():
    many, few = nn.Parameter(torch.ones(5000, dtype=torch.float64)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    sampler = StochasticHamiltonian([many, few], 0.1, num_data=10, friction=0.3, temperature=1e-22)
    for gradient in (1.0, None, 1.0):
        many.grad = None if gradient is None else torch.full_like(many, gradient)
        few.grad = torch.ones_like(few)
        sampler.step()
    torch.testing.assert_close(many.detach(), torch.full_like(many, 1 - 0.1 - (0.7 * 0.1 + 0.1)))


def test_what_is_masked_does_not_move(kind):
    build, settings = kind
    model, before = network(), network()
    weight = model[0].weight
    mask = torch.zeros_like(weight, dtype=torch.bool)
    mask[1, 2] = True
    sampler = build(model.parameters(), 0.1, num_data=10, masks={weight: mask}, **settings)
    for _ in range(8):
        step(model, sampler)
    assert torch.equal(weight[~mask], before[0].weight[~mask])
    assert (weight[mask] != before[0].weight[mask]).all()
    assert (model[2].weight != before[2].weight).all()


def test_a_thermostat_counts_only_what_moves():
    w = nn.Parameter(torch.zeros(4000, dtype=torch.float64))
    mask = torch.arange(4000) < 2000
    sampler = Thermostat([w], 0.1, num_data=10, masks={w: mask}, coupling=0.05)
    for _ in range(300):
        w.grad = w.detach().clone()
        sampler.step()
    assert w[mask].var().item() == pytest.approx(0.1, rel=5 * (2 / 2000) ** 0.5)
    assert float(sampler.friction_of(sampler.param_groups[0])) == pytest.approx(0.1, abs=0.02)


def test_a_group_of_temperature_zero_gets_no_noise(kind):
    build, settings = kind
    ends = []
    for seed in (0, 1):
        model = network()
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "temperature": 0.0}]
        sampler = build(groups, 0.1, num_data=10, **settings)
        torch.manual_seed(seed)
        step(model, sampler)
        ends.append(model)
    assert_same(ends[0][2], ends[1][2])
    assert not torch.equal(ends[0][0].weight, ends[1][0].weight)


def test_a_closure_and_parameters_without_gradients(kind):
    build, settings = kind
    model = network()
    spare = nn.Parameter(torch.ones(2))
    sampler = build([*model.parameters(), spare], 0.1, num_data=10, **settings)

    def closure():
        sampler.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    assert sampler.step(closure) > 0
    assert torch.equal(spare, torch.ones(2))


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (Langevin, {"lr": 0.0}, "lr must be positive"),
        (Langevin, {"lr": 0.1, "num_data": 0}, "num_data"),
        (Langevin, {"lr": 0.1, "temperature": -1.0}, "temperature"),
        (PreconditionedLangevin, {"lr": 0.1, "decay": 1.0}, "decay"),
        (StochasticHamiltonian, {"lr": 0.1, "friction": 0.0}, "friction"),
        (Thermostat, {"lr": 0.1, "friction": 2.0}, "friction"),
        (Thermostat, {"lr": 0.1, "coupling": 0.0}, "coupling"),
    ],
)
def test_bad_settings_are_refused(build, settings, message):
    with pytest.raises(ValueError, match=message):
        build(network().parameters(), **{"num_data": 10, **settings})


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 2, sparse=True)
    sampler: Sampler = Langevin(model.parameters(), 0.1, num_data=10)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        sampler.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [4000, 400_000])
def test_noise_of_a_step_is_gaussian(n, dtype):
    """One step from zero, without a gradient, is noise alone."""
    w = nn.Parameter(torch.zeros(n, dtype=dtype))
    w.grad = torch.zeros_like(w)
    Langevin([w], 0.1, num_data=10).step()
    noise = w.detach().double().numpy() / (2 * 0.1 / 10) ** 0.5
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    assert len(set(noise.tolist())) > 0.99 * n


def test_a_chain_of_gaussian_steps_is_gaussian():
    w = nn.Parameter(torch.zeros(200_000, dtype=torch.float64))
    sampler = Langevin([w], 0.1, num_data=10)
    for _ in range(60):
        w.grad = w.detach().clone()
        sampler.step()
    kurtosis = (w.pow(4).mean() / w.square().mean() ** 2).item()
    assert kurtosis == pytest.approx(3, abs=5 * (24 / 200_000) ** 0.5)


def test_noise_follows_the_seed_and_its_tensors():
    like = [nn.Parameter(torch.empty(70, 80)), nn.Parameter(torch.empty(3, dtype=torch.float64))]
    sampler, draws = Langevin(like, 0.1, num_data=10), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        draws.append(sampler.noise(like))
    for one, two, other, tensor in zip(*draws, like, strict=True):
        assert (one.shape, one.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(one, two)
        assert not torch.equal(one, other)


def test_weight_decay_is_a_normal_prior_in_the_loss(kind):
    build, settings = kind
    networks = [network().double() for _ in range(2)]
    samplers = [
        build(model.parameters(), 0.1, num_data=10, weight_decay=decay, **settings)
        for model, decay in zip(networks, (0.0, 0.3), strict=True)
    ]
    for seed in range(8):
        for model, sampler, in_loss in zip(networks, samplers, (0.3, 0.0), strict=True):
            torch.manual_seed(seed)
            sampler.zero_grad()
            squares = sum(p.square().sum() for p in model.parameters())
            (model(torch.ones(4, 3).double()).square().mean() + in_loss * squares / 2).backward()
            for group in sampler.param_groups:
                group["temperature"] = float(seed % 3 > 0)
            sampler.step()
    for one, other in zip(*(model.parameters() for model in networks), strict=True):
        torch.testing.assert_close(one, other)


def test_weight_decay_leaves_what_does_not_move(kind):
    build, settings = kind
    weight = nn.Parameter(torch.ones(4))
    mask = torch.tensor([True, False, True, False])
    sampler = build([weight], 0.1, num_data=10, weight_decay=0.5, masks={weight: mask}, **settings)
    for _ in range(3):
        weight.grad = torch.zeros(4)
        sampler.step()
    assert torch.equal(weight.detach() == 1, ~mask)


def test_weight_decay_is_not_lost_next_to_large_weights():
    """One step moves a weight of 1 by less than float32 can show; many do not."""
    weight = nn.Parameter(torch.ones(20_000))
    sampler = Langevin([weight], 1e-4, num_data=1000, weight_decay=1e-3)
    for _ in range(2000):
        weight.grad = torch.zeros_like(weight)
        sampler.step()
    spread = (2 * 1e-4 * 2000 / 1000) ** 0.5
    assert weight.detach().double().mean().item() == pytest.approx(1 - 2000 * 1e-7, abs=4 * spread / 20_000**0.5)


def test_parameters_that_moved_to_another_type_get_noise_of_it():
    model = nn.Linear(100, 60)
    sampler = StochasticHamiltonian(model.parameters(), 0.1, num_data=10)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        sampler.state.clear()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        sampler.step()
        assert sampler.state[model.weight]["velocity"].dtype == dtype


@pytest.mark.parametrize("temperature", [1e-7, 1.0])
@pytest.mark.parametrize("build", [Langevin, StochasticHamiltonian])
def test_half_precision_at_any_temperature(build, temperature):
    weights = [nn.Parameter(torch.randn(50, 10)), nn.Parameter(torch.randn(50, 10).half())]
    sampler = build(weights, 0.1, num_data=60_000, temperature=temperature)
    for lr in (1e-6, 1e-6, 0.1, 0.1):  # as at the start of a cycle
        sampler.param_groups[0]["lr"] = lr
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        sampler.step()
    assert all(weight.isfinite().all() for weight in weights)


@pytest.mark.parametrize("temperature", [1e-12, 0.0])
def test_little_noise_is_counted_in_other_units(temperature):
    """The same steps as those of SGD with momentum, whichever units the velocity was in before."""
    weights = [nn.Parameter(torch.ones(5, 4, dtype=torch.float64)) for _ in range(2)]
    sampler = StochasticHamiltonian(weights[:1], 0.01, num_data=10**9, temperature=1e-12)
    plain = torch.optim.SGD(weights[1:], 0.01, momentum=0.9)
    for step in range(6):
        sampler.param_groups[0]["temperature"] = temperature if step % 2 else 1e-12
        for weight in weights:
            weight.grad = weight.detach() * (step + 1)
        sampler.step()
        plain.step()
    torch.testing.assert_close(*weights, rtol=0, atol=1e-8)


def test_a_copy_keeps_what_does_not_move(kind):
    build, settings = kind
    weight = nn.Parameter(torch.ones(3, 4))
    mask = torch.eye(3, 4).bool()
    sampler = copy.deepcopy(build([weight], 0.1, num_data=10, masks={weight: mask}, **settings))
    (own,) = sampler.param_groups[0]["params"]
    own.grad = torch.ones(3, 4)
    sampler.step()
    assert torch.equal(own.detach() != 1, mask)
