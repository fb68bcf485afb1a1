"""Every sampler recovers a correlated Gaussian; one that is wrong by a factor would not pass."""

from __future__ import annotations

import pytest
import torch
from targets import COVARIANCE, MEAN, NUM_DATA, errors, run, worst

from bayeslim.samplers import Langevin, PreconditionedLangevin, StochasticHamiltonian, Thermostat

SETTINGS = {
    "sgld": (Langevin, {"lr": 0.4}, 900),
    "psgld": (PreconditionedLangevin, {"lr": 2e-2, "adapt_steps": 300}, 900),
    "sghmc": (StochasticHamiltonian, {"lr": 0.15, "friction": 0.1}, 500),
    "sghmc-adapted": (StochasticHamiltonian, {"lr": 5e-3, "friction": 0.1, "adapt_steps": 300}, 700),
    "sgnht": (Thermostat, {"lr": 0.15, "friction": 0.1, "coupling": 0.01}, 600),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_mean_and_covariance_of_a_gaussian(kind):
    build, settings, steps = SETTINGS[kind]
    draws, _ = run(build, steps, **settings)
    assert worst(draws) < 4.5


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("temperature", [4.0])
def test_noise_off_by_a_factor_of_two_is_seen(kind, temperature):
    """A temperature of 4 is the noise times two; it also shows that it is the tempered posterior that is sampled."""
    build, settings, steps = SETTINGS[kind]
    if kind in ("psgld", "sghmc-adapted"):  # measured in units of gradients that are themselves hotter
        settings = settings | {"lr": settings["lr"] * temperature**0.5}
    draws, _ = run(build, steps, **settings, temperature=temperature)
    assert errors(draws)[1].max() > 10
    assert worst(draws, MEAN, temperature * COVARIANCE) < 4.5


@pytest.mark.parametrize("kind", ["psgld", "sgnht"])
def test_minibatches_counted_as_the_data_are_seen(kind):
    """The size of a batch where the number of data belongs."""
    build, settings, steps = SETTINGS[kind]

    def wrong(params, num_data, **rest):
        return build(params, num_data=num_data // 5, **rest)

    assert errors(run(wrong, steps, **settings)[0])[1].max() > 10


@pytest.mark.parametrize("friction", [0.1, 0.5, 1.0])
def test_the_variance_at_a_large_step_is_as_documented(friction):
    lr, curvature = 0.5, 1.0
    w = torch.nn.Parameter(torch.zeros(40_000, dtype=torch.float64))
    sampler = StochasticHamiltonian([w], lr, num_data=10, friction=friction)
    for _ in range(150):
        w.grad = curvature * w.detach()
        sampler.step()
    expected = 1 / (10 * curvature) / (1 - lr * curvature / (4 - 2 * friction))
    assert w.var().item() == pytest.approx(expected, rel=5 * (2 / 40_000) ** 0.5)
    assert abs(expected * 10 * curvature - 1) > 10 * (2 / 40_000) ** 0.5  # the test would see a plain 1/λ


def test_a_friction_of_one_is_langevin_dynamics():
    ends = []
    for build, settings in ((Langevin, {}), (StochasticHamiltonian, {"friction": 1.0})):
        torch.manual_seed(4)
        ends.append(run(build, 20, lr=0.3, chains=5, **settings)[0])
    torch.testing.assert_close(*ends)


def test_noise_of_gradients_is_made_up_for_by_the_thermostat():
    draws, sampler = run(Thermostat, 900, noise=0.15, **SETTINGS["sgnht"][1])
    assert worst(draws) < 4.5
    friction = float(sampler.friction_of(sampler.param_groups[0]))
    added = 0.15 * 0.15**2 * NUM_DATA / 2  # lr / 2 times the variance of the gradients, in units of lr / N
    assert friction == pytest.approx(0.1 + added, rel=0.1)


def test_noise_of_gradients_is_measured_and_left_out_when_adapting():
    settings = SETTINGS["sghmc-adapted"][1] | {"lr": 8e-3}
    draws, _ = run(StochasticHamiltonian, 900, noise=0.15, **settings, independent=True)
    assert worst(draws) < 4.5
    assert worst(run(StochasticHamiltonian, 900, noise=0.15, **settings)[0]) > 4.5


def test_without_either_the_chain_is_too_hot():
    draws, _ = run(StochasticHamiltonian, 600, noise=0.15, **SETTINGS["sghmc"][1])
    assert errors(draws)[1].max() > 10


def test_a_preconditioner_that_never_stops_following_misses_the_target():
    """Why it is held after burn-in."""
    draws, _ = run(PreconditionedLangevin, 900, lr=2e-2, decay=0.9, adapt_steps=None)
    assert worst(draws) > 8


@pytest.mark.parametrize("kind", ["psgld", "sghmc-adapted"])
def test_weights_that_are_idle_in_the_burn_in_take_no_huge_steps_later(kind):
    """The weights of a unit of ReLU that no input reaches have no gradients, until it moves."""
    sampler_class, settings, _ = SETTINGS[kind]
    torch.manual_seed(0)
    curvature, num_data = 10.0, 100
    w = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    sampler = sampler_class([w], num_data=num_data, **settings | {"lr": 5e-3})
    for step in range(2000):
        w.grad = curvature * w.detach()
        if step < settings["adapt_steps"]:
            w.grad[-1] = 0.0
        sampler.step()
    assert float(w.detach().abs().max()) < 10 / (curvature * num_data) ** 0.5
