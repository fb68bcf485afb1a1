"""Gaussian scales, q(z) = N(μ, σ²), trained in μ and log σ.

Several gates share them and differ in their priors. A scale whose noise exceeds its signal carries little information,
so gates are scored by α = σ²/μ².
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslim.gates.base import Gate, log_alpha, positive, precise
from bayeslim.noise import standard_normal
from bayeslim.types import Params


@dataclass(frozen=True)
class GaussianGate(Gate):
    """Gates z ~ N(μ, σ²).

    Attributes:
        initial_std: the initial σ, where μ = 1. The papers have log σ² = −9.
        threshold: gates with a score −log α of at most this are closed; 0 closes those with more noise than signal.
    """

    initial_std: float = math.exp(-4.5)
    threshold: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("initial_std", self.initial_std)

    def start(self, count: int) -> Params:
        """Return μ = 1 and a small σ, so that a trained network starts unchanged."""
        return {"mean": torch.ones(count), "log_std": torch.full((count,), math.log(self.initial_std))}

    def draw(self, own: Params, shape: tuple[int, ...]) -> Tensor:
        """Draw z = μ + σ ε."""
        mean, log_std = precise(own, "mean", "log_std")
        noise = standard_normal((*shape, mean.numel()), dtype=mean.dtype, device=mean.device)
        return torch.addcmul(mean, log_std.exp(), noise)

    def mean(self, own: Params) -> Tensor:
        """Return μ."""
        (mean,) = precise(own, "mean")
        return mean

    def variance(self, own: Params) -> Tensor:
        """Return σ²."""
        (log_std,) = precise(own, "log_std")
        return (2 * log_std).exp()

    @abstractmethod
    def kl(self, own: Params) -> Tensor:
        """Compute the KL, a function of α alone."""

    def score(self, own: Params) -> Tensor:
        """Compute −log α = log μ²/σ²."""
        mean, log_std = precise(own, "mean", "log_std")
        return -log_alpha(mean, log_std)
