"""Moments of activations, against numerical integration."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslim.predict.moments.closed_forms import clamp, leaky_relu, quadrature, relu

GRID = torch.linspace(-14, 14, 280_001, dtype=torch.float64)
WEIGHTS = torch.exp(-0.5 * GRID.square())
WEIGHTS /= WEIGHTS.sum()

PIECEWISE = {
    "relu": (relu, F.relu),
    "leaky_relu": (lambda m, v: leaky_relu(m, v, 0.2), lambda z: F.leaky_relu(z, 0.2)),
    "relu6": (lambda m, v: clamp(m, v, 0.0, 6.0), F.relu6),
    "hardtanh": (lambda m, v: clamp(m, v, -1.0, 0.5), lambda z: F.hardtanh(z, -1.0, 0.5)),
    "clamp_max": (lambda m, v: clamp(m, v, None, 0.3), lambda z: z.clamp(max=0.3)),
    "clamp_min": (lambda m, v: clamp(m, v, 0.3, None), lambda z: z.clamp(min=0.3)),
    "no clamp": (lambda m, v: clamp(m, v, None, None), lambda z: z),
}
SMOOTH = {f.__name__: f for f in (torch.tanh, torch.sigmoid, F.gelu, F.silu, F.softplus, F.mish, torch.sin, torch.exp)}


def integrated(function, mean: float, variance: float) -> tuple[float, float, float]:
    """Mean, variance and slope of function(z), z ~ N(mean, variance), on a fine grid."""
    std = math.sqrt(variance)
    values = function(mean + std * GRID)
    centre = (WEIGHTS * values).sum()
    spread = (WEIGHTS * (values - centre).square()).sum()
    return centre.item(), spread.item(), ((WEIGHTS * values * GRID).sum() / std).item()


@pytest.mark.parametrize("name", PIECEWISE)
@settings(max_examples=25, deadline=None)
@given(mean=st.floats(-8, 8), variance=st.floats(1e-3, 30))
def test_piecewise_linear_activations_are_exact(name, mean, variance):
    closed, function = PIECEWISE[name]
    ours = closed(torch.tensor([mean], dtype=torch.float64), torch.tensor([variance], dtype=torch.float64))
    for mine, theirs in zip(ours, integrated(function, mean, variance), strict=True):
        assert mine.item() == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", SMOOTH)
@settings(max_examples=15, deadline=None)
@given(mean=st.floats(-4, 4), variance=st.floats(1e-4, 2))
def test_smooth_activations_by_quadrature(name, mean, variance):
    function = SMOOTH[name]
    ours = quadrature(
        function, torch.tensor([mean], dtype=torch.float64), torch.tensor([variance], dtype=torch.float64)
    )
    for mine, theirs in zip(ours, integrated(function, mean, variance), strict=True):
        assert mine.item() == pytest.approx(theirs, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("closed", [relu, lambda m, v: quadrature(torch.tanh, m, v)])
def test_without_variance_it_is_the_function_itself(closed):
    mean = torch.tensor([-2.0, 0.0, 3.0])
    value, spread, _ = closed(mean, torch.zeros(3))
    assert torch.allclose(value, (F.relu if closed is relu else torch.tanh)(mean))
    assert torch.equal(spread, torch.zeros(3))


@pytest.mark.parametrize("mean", [-3e4, -50.0, 50.0, 3e4])
def test_far_from_the_kink_single_precision_is_enough(mean):
    value, spread, slope = relu(torch.tensor([mean]), torch.tensor([1.0]))
    assert value.item() == pytest.approx(max(mean, 0.0), abs=1e-20)
    assert spread.item() == pytest.approx(float(mean > 0), abs=1e-4)
    assert slope.item() == float(mean > 0)
