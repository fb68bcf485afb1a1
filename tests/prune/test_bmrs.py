"""Bayesian model reduction of truncated log-normal gates, against numerical integration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

import bayeslim as bl
from bayeslim import families, gates, likelihoods
from bayeslim.gates import TruncatedLogNormal
from bayeslim.prune.criteria.bmrs import gain_of_spike, gain_of_uniform

GATE = TruncatedLogNormal()
CASES = [(mean, std) for mean in (-25.0, -18.0, -6.0, -0.2, 3.0) for std in (0.5, 2.0, 9.0, 60.0)]
every_case = pytest.mark.parametrize(("mean", "std"), CASES)


def own(mean: float, std: float) -> dict[str, torch.Tensor]:
    at = {"log_mean": mean, "log_std": math.log(std)}
    return {name: torch.tensor([value], dtype=torch.float64) for name, value in at.items()}


def log_expectation(mean: float, std: float, log_ratio) -> float:
    """log E_q of a ratio of priors, by quadrature over log z in [−20, 0]."""
    grid = np.linspace(GATE.log_low, GATE.log_high, 400_001)
    log_q = stats.norm.logpdf(grid, mean, std)
    return log_integral(log_q + log_ratio(grid), grid) - log_integral(log_q, grid)


def log_integral(log_values: np.ndarray, grid: np.ndarray) -> float:
    top = log_values.max()
    return float(top + np.log(integrate.trapezoid(np.exp(log_values - top), grid)))


@every_case
@pytest.mark.parametrize("spike", [0.05, 1.0])
def test_the_gain_of_a_spike_is_the_expected_ratio_of_the_priors(mean: float, std: float, spike: float) -> None:
    reduced = stats.truncnorm(0, 20 / spike, loc=-20, scale=spike)
    wanted = log_expectation(mean, std, lambda t: reduced.logpdf(t) + math.log(20))
    assert gain_of_spike(GATE, own(mean, std), spike).item() == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@every_case
def test_a_narrow_spike_is_the_savage_dickey_ratio_at_the_smallest_scale(mean: float, std: float) -> None:
    ends = ((end - mean) / std for end in (-20.0, 0.0))
    wanted = stats.truncnorm(*ends, loc=mean, scale=std).logpdf(-20.0) + math.log(20)
    assert gain_of_spike(GATE, own(mean, std)).item() == pytest.approx(wanted, rel=1e-4, abs=1e-4)


@every_case
@pytest.mark.parametrize("bits", [4, 8])
def test_the_gain_of_a_uniform_prior_is_the_expected_ratio_of_the_priors(mean: float, std: float, bits: int) -> None:
    low, high = -23 * math.log(2), -bits * math.log(2)
    q = stats.truncnorm((-20 - mean) / std, (0 - mean) / std, loc=mean, scale=std)
    inside = integrate.quad(q.pdf, low, high, points=sorted({low, high, min(max(mean, low), high)}), epsabs=0)[0]
    found = gain_of_uniform(GATE, own(mean, std), bits).item()
    if inside > 1e-200:
        assert found == pytest.approx(math.log(inside) - math.log((high - low) / 20), rel=1e-4, abs=1e-6)
    else:
        assert found < -300


def test_a_gate_that_learned_nothing_gains_nothing() -> None:
    assert gain_of_spike(GATE, own(-10.0, 1e4)).item() == pytest.approx(0.0, abs=1e-5)
    assert gain_of_uniform(GATE, own(-10.0, 1e4)).item() == pytest.approx(0.0, abs=1e-5)


def network(gate: gates.Gate) -> bl.Bayesian:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    method = bl.Variational(families.Point(), gates=gate, gate_at={"2": "inputs"})
    return bl.bayesianize(model, method, likelihood=likelihoods.Categorical(), num_data=20)


@pytest.mark.parametrize(("criterion", "mean"), [("bmrs", -19.0), ("bmrs_uniform", -12.0)])
@pytest.mark.parametrize("granularity", ["unit", "weight"])
def test_the_evidence_closes_units_without_a_threshold_to_tune(criterion: str, mean: float, granularity: str) -> None:
    bnn, x = network(TruncatedLogNormal(threshold=0.0)), torch.randn(5, 4)
    place = bnn.state["places"][0]
    with torch.no_grad():  # units 1 and 4 have posteriors where the reduced prior is
        bnn.model.get_parameter(place.parameter("log_mean"))[[1, 4]] = mean
        bnn.model.get_parameter(place.parameter("log_std"))[[1, 4]] = math.log(4.0)
    plan = bl.plan(bnn, bl.Budget(threshold=0.0), criterion=criterion, granularity=granularity, example=x)
    cut = ~plan.masks["2.weight"]
    assert cut.all(0).tolist() == [False, True, False, False, True, False]
    assert not cut[:, [0, 2, 3, 5]].any()
    slim = bl.compact(bl.prune(bnn, plan), example=x)
    assert sum(p.numel() for p in slim.parameters()) == 4 * 4 + 4 + 4 * 3 + 3


def test_other_gates_and_posteriors_are_refused() -> None:
    with pytest.raises(TypeError, match="TruncatedLogNormal"):
        bl.plan(network(gates.NormalJeffreys()), bl.Budget(threshold=0.0), criterion="bmrs")
    plain = bl.bayesianize(nn.Linear(3, 2), bl.Variational(), likelihood=likelihoods.Categorical())
    with pytest.raises(TypeError, match='criterion="bmrs" ranks by gates'):
        bl.plan(plain, bl.Budget(threshold=0.0), criterion="bmrs")
    with pytest.raises(ValueError, match="bits"):
        gain_of_uniform(GATE, own(0.0, 1.0), bits=40)
