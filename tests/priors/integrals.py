"""Slow, exact divergences by numerical integration."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bayeslim.priors import Prior

EDGE = 13.0
"""Standard deviations that count."""


def expectation(f: Callable[[Tensor], Tensor], mean: float, std: float) -> float:
    """E f(w) of w ~ N(mean, std²): Gauss-Legendre on panels that get finer towards w = 0, where f may be singular."""
    nodes, weights = np.polynomial.legendre.leggauss(24)
    zero = min(EDGE, max(-EDGE, -mean / std))
    total = 0.0
    for side in (-1.0, 1.0):
        length = EDGE - side * zero
        ends = length * np.concatenate([[0.0], 2.0 ** np.arange(-70, -3), np.linspace(0.125, 1, 80)])
        half = np.diff(ends) / 2
        distance = side * ((ends[:-1] + half)[:, None] + half[:, None] * nodes)
        w = mean + std * (zero + distance) if abs(zero) == EDGE else std * distance
        values = f(torch.as_tensor(w)).numpy() * np.exp(-0.5 * (zero + distance) ** 2)
        total += float((values * weights * half[:, None]).sum())
    return total / math.sqrt(2 * math.pi)


def kl(prior: Prior, mean: float, std: float) -> float:
    """KL(N(mean, std²) ‖ p) of one weight, from the prior's own density."""
    entropy = math.log(std) + 0.5 * math.log(2 * math.pi * math.e)
    return -expectation(prior.log_prob, mean, std) - entropy


def slope(f: Callable[[float], float], at: float, step: float = 1e-4) -> float:
    """The derivative of f, from a symmetric difference of the fourth order."""
    near, far = f(at + step) - f(at - step), f(at + 2 * step) - f(at - 2 * step)
    return (8 * near - far) / (12 * step)
