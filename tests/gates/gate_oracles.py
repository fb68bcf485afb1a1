"""Slow answers about gates: the quantile function of every kind, and expectations from it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy import special, stats

from bayeslim import gates

Values = dict[str, float]
GRID = (np.arange(100_000) + 0.5) / 100_000


def quantile(gate: gates.Gate, at: Values, u: np.ndarray) -> np.ndarray:
    """The z below which the fraction u of the draws of one gate lies."""
    match gate:
        case gates.NormalJeffreys(centred=True):
            return np.exp(stats.norm.ppf(u, at["log_mean"], math.exp(at["log_std"])))
        case gates.NormalJeffreys() | gates.InformationBottleneck():
            return stats.norm.ppf(u, at["mean"], math.exp(at["log_std"]))
        case gates.HalfCauchy():
            mean = 0.5 * sum(v for n, v in at.items() if n.endswith("_mean"))
            variance = 0.25 * sum(math.exp(2 * v) for n, v in at.items() if n.endswith("_log_std"))
            return np.exp(stats.norm.ppf(u, mean, math.sqrt(variance)))
        case gates.TruncatedLogNormal():
            mean, std = at["log_mean"], math.exp(at["log_std"])
            ends = (gate.log_low - mean) / std, (gate.log_high - mean) / std
            return np.exp(mean + std * stats.truncnorm.ppf(u, *ends))
        case gates.HardConcrete():
            s = special.expit((special.logit(u) + at["log_alpha"]) / gate.temperature)
            return np.clip(s * (gate.high - gate.low) + gate.low, 0, 1)
        case gates.Bernoulli(learn="concrete"):
            keep = special.expit(-at["logit"])
            return special.expit((special.logit(u) - at["logit"]) / gate.temperature) / keep
        case gates.Bernoulli():
            keep = special.expit(-at["logit"] if gate.learn else special.logit(1 - gate.rate))
            return np.where(u > 1 - keep, 1 / keep, 0.0)
    raise NotImplementedError(gate)


def expectation(f: Callable[[np.ndarray], np.ndarray], gate: gates.Gate, at: Values) -> float:
    """E f(z) of one gate."""
    return float(f(quantile(gate, at, GRID)).mean())


def parameters(gate: gates.Gate, at: Values, count: int = 1, dtype: torch.dtype = torch.float64) -> dict:
    """Parameters of equal gates, to differentiate."""
    sizes = {name: 1 if name in gate.shared else count for name in at}
    return {name: torch.full((sizes[name],), v, dtype=dtype, requires_grad=True) for name, v in at.items()}


def half_cauchy(a: float, b: float, s: float, t: float, *log_stds: float) -> Values:
    """Parameters of a half-Cauchy gate: the means of its four factors, and their log σ."""
    factors = ("a", "b", "layer_a", "layer_b")
    means = {f"{f}_mean": v for f, v in zip(factors, (a, b, s, t), strict=True)}
    return means | {f"{f}_log_std": v for f, v in zip(factors, log_stds, strict=True)}


ORDINARY: list[tuple[gates.Gate, Values]] = [
    (gates.NormalJeffreys(), {"mean": 0.8, "log_std": -0.7}),
    (gates.NormalJeffreys(), {"mean": -0.2, "log_std": 0.3}),
    (gates.InformationBottleneck(), {"mean": 1.1, "log_std": -1.0}),
    (gates.HalfCauchy(), half_cauchy(0.2, 0.5, -0.4, 0.1, -1.0, -0.5, -2.0, -0.8)),
    (gates.HalfCauchy(global_scale=0.1), half_cauchy(0.0, 3.0, -4.6, 0.0, -4.5, -4.0, -0.5, -0.6)),
    (gates.TruncatedLogNormal(), {"log_mean": -0.5, "log_std": -0.5}),
    (gates.TruncatedLogNormal(), {"log_mean": 0.4, "log_std": -4.5}),
    (gates.TruncatedLogNormal(), {"log_mean": -3.0, "log_std": 2.0}),
    (gates.TruncatedLogNormal(log_low=-2.0, log_high=1.0), {"log_mean": -4.0, "log_std": -0.2}),
    (gates.HardConcrete(), {"log_alpha": 0.5}),
    (gates.HardConcrete(), {"log_alpha": -1.5}),
    (gates.HardConcrete(temperature=0.3, low=-0.4, high=1.2), {"log_alpha": 1.0}),
    (gates.Bernoulli(rate=0.3), {"logit": 0.0}),
    (gates.Bernoulli(learn="concrete"), {"logit": -0.8}),
    (gates.Bernoulli(learn="reinforce"), {"logit": 0.6}),
]
NAMES = [f"{type(gate).__name__}-{i}" for i, (gate, _) in enumerate(ORDINARY)]
