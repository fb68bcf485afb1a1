"""The variational information bottleneck: Gaussian scales with a fitted prior.

    q(z) = N(μ, σ²),      p(z) = N(0, ξ)  at its best ξ = μ² + σ²,      KL(q ‖ p) = ½ log(1 + μ²/σ²)

The KL bounds the information that a unit passes on; it vanishes as α = σ²/μ² → ∞, and units with log α > 0 go.

Counted once for each of the n weights that go with a unit, n/2 log(1 + 1/α), it is what these weights would cost with
noise of the same α on each of them (`priors.RelevanceDetermination`). All weights of a gate share one noise, which does
far more harm, so the strength per weight is a fraction of 1. A unit then costs in proportion to its weights, in narrow
layers and in wide ones.

The paper counts the KL for each example, because every example has noise of its own. With per="example" the loss is

    E[−log p(y | x, z)] + γ Σ nᵢ KLᵢ / Σ nᵢ,      γ the strength,  nᵢ the weights that go with unit i

Dai, Zhu, Guo & Wipf 2018, arXiv:1802.10399 (VIBNet)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayeslim.gates.base import Per, check_per, positive
from bayeslim.gates.gaussian import GaussianGate
from bayeslim.io.registry import register
from bayeslim.types import Params


@register("gate")
@dataclass(frozen=True)
class InformationBottleneck(GaussianGate):
    """Gates z ~ N(μ, σ²) that pay for the information they let through.

    Attributes:
        strength: a factor on the KL. At 1 the objective is a variational bound; the paper weighs layers by it.
        per: what the KL counts for, one of `Per`.
    """

    strength: float = 1.0
    per: Per = "gate"
    name: ClassVar[str] = "information_bottleneck"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("strength", self.strength)
        check_per(self.per)

    def kl(self, own: Params) -> Tensor:
        """Compute ½ Σ log(1 + 1/α), times the strength."""
        score = self.score(own)
        return 0.5 * self.strength * torch.logaddexp(score, torch.zeros_like(score)).sum()
