"""The variational information bottleneck: Gaussian scales whose prior variance is fitted.

    q(z) = N(μ, σ²),      p(z) = N(0, ξ)  at its best ξ = μ² + σ²,      KL(q ‖ p) = ½ log(1 + μ²/σ²)

The KL bounds the information that a unit passes on; it vanishes as α = σ²/μ² → ∞, and units with log α > 0 go.

Dai, Zhu, Guo & Wipf 2018, arXiv:1802.10399 (VIBNet)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayeslim.gates.base import positive
from bayeslim.gates.gaussian import GaussianGate
from bayeslim.types import Params


@dataclass(frozen=True)
class InformationBottleneck(GaussianGate):
    """Gates z ~ N(μ, σ²) that pay for the information they let through.

    Attributes:
        strength: a factor on the KL. At 1 the objective is a variational bound; the paper weighs layers by it.
    """

    strength: float = 1.0
    name: ClassVar[str] = "information_bottleneck"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("strength", self.strength)

    def kl(self, own: Params) -> Tensor:
        """½ Σ log(1 + 1/α), times the strength."""
        score = self.score(own)
        return 0.5 * self.strength * torch.logaddexp(score, torch.zeros_like(score)).sum()
