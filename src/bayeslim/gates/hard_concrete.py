"""Hard-concrete gates: an L0 penalty that can be differentiated.

    s = sigmoid((log u − log(1−u) + log α) / β),   u ~ U(0, 1)       a concrete (relaxed Bernoulli) variable,
    z = min(1, max(0, s (ζ − γ) + γ))                                stretched to (γ, ζ) and clamped to [0, 1]

so that z is exactly 0 and exactly 1 with positive probabilities, and

    P(z > t) = sigmoid(log α − β logit((t − γ)/(ζ − γ)))  for 0 ≤ t < 1.

The penalty, in place of a KL, is a cost for every gate that is not zero, cost · P(z > 0). E z = ∫₀¹ P(z > t) dt and
E z² = ∫₀¹ 2t P(z > t) dt have smooth integrands, which Gauss-Legendre nodes integrate to machine precision. The mean
network has the paper's gates, ẑ = min(1, max(0, sigmoid(log α)(ζ − γ) + γ)), which are exactly zero where it is closed.

Louizos, Welling & Kingma 2018, arXiv:1712.01312
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from bayeslim.gates.base import Gate, Per, check_per, positive, precise, uniform
from bayeslim.io.registry import register
from bayeslim.types import Params

NODES = 24


@register("gate")
@dataclass(frozen=True)
class HardConcrete(Gate):
    """Gates in [0, 1] that are exactly 0 or 1 most of the time.

    Attributes:
        cost: the penalty of an open gate, in nats.
        per: what the cost counts for, one of `Per`. The paper's λ is per weight and per example: per="weight" with
            cost = λ · data size, 0.1 in its experiments.
        initial_rate: the initial probability of dropping (of the variable before it is stretched).
        temperature: β.
        low: γ, below 0.
        high: ζ, above 1.
        threshold: gates with sigmoid(log α)(ζ − γ) + γ of at most this are closed.
    """

    cost: float = 10.0
    per: Per = "gate"
    initial_rate: float = 0.1
    temperature: float = 2 / 3
    low: float = -0.1
    high: float = 1.1
    threshold: float = 0.0
    name: ClassVar[str] = "hard_concrete"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("temperature", self.temperature)
        check_per(self.per)
        if not 0 <= self.cost < math.inf:
            raise ValueError(f"cost must not be negative. Got {self.cost!r}.")
        if not 0 < self.initial_rate < 1:
            raise ValueError(f"initial_rate must be between 0 and 1. Got {self.initial_rate!r}.")
        if not -math.inf < self.low < 0 or not 1 < self.high < math.inf:
            raise ValueError(f"[low, high] must contain 0 and 1 in its inside. Got {[self.low, self.high]}.")

    def start(self, count: int) -> Params:
        """Return log α = log (1 − p)/p."""
        return {"log_alpha": torch.full((count,), math.log((1 - self.initial_rate) / self.initial_rate))}

    def draw(self, own: Params, shape: tuple[int, ...]) -> Tensor:
        """Draw z, differentiable where a draw is not clamped."""
        (log_alpha,) = precise(own, "log_alpha")
        u = uniform((*shape, log_alpha.numel()), log_alpha)
        return self._stretched((torch.logit(u) + log_alpha) / self.temperature).clamp(0, 1)

    def mean(self, own: Params) -> Tensor:
        """Compute ∫₀¹ P(z > t) dt."""
        return self._moments(own)[0].to(precise(own, "log_alpha")[0])

    def variance(self, own: Params) -> Tensor:
        """Compute ∫₀¹ 2t P(z > t) dt − E[z]²."""
        mean, square = self._moments(own)
        return (square - mean.square()).clamp(min=0).to(precise(own, "log_alpha")[0])

    def kl(self, own: Params) -> Tensor:
        """Compute cost · Σ P(z > 0)."""
        return self.cost * self.open_probability(own).sum()

    def open_probability(self, own: Params) -> Tensor:
        """Compute P(z > 0), (count,)."""
        (log_alpha,) = precise(own, "log_alpha")
        return torch.sigmoid(log_alpha - self.temperature * math.log(-self.low / self.high))

    def score(self, own: Params) -> Tensor:
        """Compute sigmoid(log α)(ζ − γ) + γ: the gate before it is clamped."""
        (log_alpha,) = precise(own, "log_alpha")
        return self._stretched(log_alpha)

    def fixed(self, own: Params) -> Tensor:
        """Compute ẑ of the paper."""
        score = self.score(own)
        return torch.where(self.opened(own), score.clamp(0, 1), torch.zeros_like(score))

    def _stretched(self, logit: Tensor) -> Tensor:
        return torch.sigmoid(logit) * (self.high - self.low) + self.low

    def _moments(self, own: Params) -> tuple[Tensor, Tensor]:
        """Compute E[z] and E[z²] in float64, since their difference cancels."""
        log_alpha = own["log_alpha"].double()
        nodes, lengths = (torch.as_tensor(v, device=log_alpha.device) for v in np.polynomial.legendre.leggauss(NODES))
        t, weights = 0.5 + 0.5 * nodes, 0.5 * lengths
        logit = torch.logit((t - self.low) / (self.high - self.low))
        survival = torch.sigmoid(log_alpha[:, None] - self.temperature * logit)
        return survival @ weights, survival @ (2 * t * weights)
