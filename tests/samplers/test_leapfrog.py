"""Hamiltonian Monte Carlo against closed forms."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean

import pytest
import torch
from targets import COVARIANCE, MEAN, PRECISION, worst
from torch import Tensor

from bayeslim.methods.shared.hamiltonian import _trajectory, _windows, answered, hamiltonian_monte_carlo


def gaussian(scale: Tensor | float = 1.0):
    """A correlated Gaussian with its coordinates stretched."""
    precision = PRECISION / torch.outer(torch.as_tensor(scale).expand(3), torch.as_tensor(scale).expand(3)).double()

    def potential(q: Tensor) -> tuple[float, Tensor]:
        pull = precision @ (q - MEAN)
        return float(0.5 * (q - MEAN) @ pull), pull

    return potential


def draws_of(potential, samples=1500, **settings):
    options = {"samples": samples, "warmup": 400, "leapfrog": 12} | settings
    return hamiltonian_monte_carlo(potential, torch.zeros(3, dtype=torch.float64), **options)


def test_mean_and_covariance_of_a_gaussian():
    trace = draws_of(gaussian())
    assert worst(trace.draws[::2]) < 4.5  # every second draw is about independent
    assert trace.divergences == 0
    assert trace.potentials[7] == pytest.approx(gaussian()(trace.draws[7])[0])
    kinetic = torch.tensor(trace.energies) - torch.tensor(trace.potentials)
    assert (kinetic >= 0).all()
    assert kinetic.mean().item() == pytest.approx(1.5, abs=0.15)  # half a unit for each of three momenta


def test_a_gradient_or_a_momentum_that_is_wrong_is_seen():
    def steeper(q: Tensor) -> tuple[float, Tensor]:
        energy, pull = gaussian()(q)
        return energy / 2, pull / 2  # another temperature

    assert worst(draws_of(steeper, samples=400).draws[::2]) > 8


def test_the_step_size_is_set_for_the_wanted_acceptance():
    def found(target: float) -> tuple[float, float]:
        """Acceptance and step size, means over four chains: of one they differ by a tenth."""
        options = {"samples": 300, "warmup": 800, "leapfrog": 3, "target_acceptance": target}
        start = torch.zeros(200, dtype=torch.float64)
        traces = [hamiltonian_monte_carlo(lambda q: (float(q @ q / 2), q), start, **options) for _ in range(4)]
        return fmean(t.acceptance for t in traces), fmean(t.step_size for t in traces)

    (often, long), (always, short) = found(0.6), found(0.9)
    assert often == pytest.approx(0.6, abs=0.12)
    assert always == pytest.approx(0.9, abs=0.12)
    assert long > 1.1 * short


def test_masses_follow_the_scales():
    scale = torch.tensor([0.01, 1.0, 30.0], dtype=torch.float64)
    trace = draws_of(gaussian(scale), samples=600, warmup=800)
    ratio = trace.inverse_mass / (COVARIANCE.diagonal() * scale**2)
    assert (ratio.log().abs() < math.log(2)).all()
    assert worst(trace.draws[::2], MEAN, COVARIANCE * torch.outer(scale, scale)) < 5


def test_the_dynamics_are_reversible_and_keep_the_energy():
    q, p = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 0.5, -0.2], dtype=torch.float64)
    mass = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    potential = gaussian()
    energy, gradient = potential(q)

    def error(step: float) -> float:
        _, end, after, _ = answered(_trajectory(q, p, gradient, step, round(1 / step), mass), potential)
        return after + 0.5 * float((end**2 * mass).sum()) - energy - 0.5 * float((p**2 * mass).sum())

    new_q, new_p, _, new_gradient = answered(_trajectory(q, p, gradient, 0.05, 20, mass), potential)
    back, _, _, _ = answered(_trajectory(new_q, -new_p, new_gradient, 0.05, 20, mass), potential)
    torch.testing.assert_close(back, q)
    assert abs(error(0.05)) < 0.05
    assert error(0.02) / error(0.01) == pytest.approx(4, rel=0.2)  # second order


def test_walls_are_not_crossed():
    def half_normal(q: Tensor) -> tuple[float, Tensor]:
        return (float(q @ q / 2) if bool((q > 0).all()) else math.inf), q

    trace = hamiltonian_monte_carlo(
        half_normal, torch.ones(1, dtype=torch.float64), samples=2000, warmup=100, leapfrog=4, target_acceptance=0.6
    )
    assert (trace.draws > 0).all()
    assert trace.draws.mean().item() == pytest.approx((2 / math.pi) ** 0.5, abs=0.08)
    with pytest.raises(ArithmeticError, match="finite density"):
        hamiltonian_monte_carlo(half_normal, -torch.ones(1, dtype=torch.float64), samples=1, warmup=0)


def test_windows_double_and_end_before_the_warm_up_does():
    windows = _windows(400)
    assert windows[0] == (60, 80)
    assert windows[-1][1] == 350
    assert all(before[1] == after[0] for before, after in pairwise(windows))
    assert _windows(5) == []


@pytest.mark.parametrize("warmup", [20, 30, 50])
def test_a_short_warm_up_leaves_time_for_the_step_size(warmup):
    scales = torch.logspace(-1, 1, 20, dtype=torch.float64)

    def potential(q: torch.Tensor) -> tuple[float, torch.Tensor]:
        return float((q / scales).square().sum() / 2), q / scales**2

    for seed in range(4):
        torch.manual_seed(seed)
        start = scales * torch.randn(20, dtype=torch.float64)
        assert hamiltonian_monte_carlo(potential, start, samples=40, warmup=warmup).acceptance > 0.7
