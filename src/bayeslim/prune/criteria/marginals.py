"""Means and standard deviations of single weights, and the ratios that several criteria share.

All values are float64. The marginal of a weight is q(w) = N(μ, σ²), with σ² = Σ_ii for a correlated posterior. A point
mass at zero (a weight that was cut) has the lowest score of every criterion, one away from zero the highest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeslim.posteriors import Posterior

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def marginals(posterior: Posterior) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (μ, σ) of every weight by parameter name."""
    std = posterior.std
    return {name: (mean.double(), std[name].double()) for name, mean in posterior.mean.items()}


def signal_to_noise(mean: Tensor, std: Tensor) -> Tensor:
    """Divide |μ| by σ; zero for a point mass at zero."""
    return torch.where(mean == 0, 0.0, mean.abs() / std)


def minus_log_density_at_zero(mean: Tensor, std: Tensor) -> Tensor:
    """Compute −log N(0 | μ, σ²); infinite for a point mass away from zero."""
    value = signal_to_noise(mean, std).square() / 2 + std.log() + HALF_LOG_2PI
    return torch.where((std == 0) & (mean != 0), torch.inf, value)
