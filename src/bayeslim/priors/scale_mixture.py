"""The scale mixture of Bayes by Backprop: most weights tiny, some large.

    p(w) = π N(w | 0, σ₁²) + (1 − π) N(w | 0, σ₂²)

Its logarithm is taken as a log-sum-exp, since either density alone underflows a few σ out. The KL is estimated.

Blundell et al. 2015, arXiv:1505.05424, with π ∈ {¼, ½, ¾}, −log σ₁ ∈ {0, 1, 2} and −log σ₂ ∈ {6, 7, 8}
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from bayeslim.io.registry import register
from bayeslim.priors.learnable import Learnable


@register("prior")
@dataclass(frozen=True, repr=False)
class ScaleMixture(Learnable):
    """Two Normals around zero, a wide and a narrow one.

    Attributes:
        pi: the share of the first.
        sigma1: the first's *standard deviation* (not its −log).
        sigma2: the second's.
        samples: the number of draws that estimate the KL.
    """

    pi: float | Tensor = 0.5
    sigma1: float | Tensor = 1.0
    sigma2: float | Tensor = 0.0025
    samples: int = field(default=1, kw_only=True)
    name: ClassVar[str] = "scale_mixture"
    limits: ClassVar = {"pi": constraints.unit_interval, "sigma1": constraints.positive, "sigma2": constraints.positive}

    def log_prob(self, weight: Tensor) -> Tensor:
        """Compute log [π N(w | 0, σ₁²) + (1 − π) N(w | 0, σ₂²)]."""
        pi = self.setting_like("pi", weight)
        first, second = (self.setting_like(name, weight) for name in ("sigma1", "sigma2"))
        wide = pi.log() - first.log() - 0.5 * (weight / first).square()
        narrow = (-pi).log1p() - second.log() - 0.5 * (weight / second).square()
        return torch.logaddexp(wide, narrow) - 0.5 * math.log(2 * math.pi)

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw weights of a shape."""
        draws = torch.randn(shape, generator=generator)
        pi, first, second = (self.setting_like(name, draws) for name in ("pi", "sigma1", "sigma2"))
        return draws * torch.where(torch.rand(shape, generator=generator) < pi, first, second)
