"""The Student-t prior: tails that fall off like |w|^−(ν+1).

    p(w) = Γ((ν+1)/2) / (Γ(ν/2) √(νπ) s) · (1 + w²/(ν s²))^(−(ν+1)/2)

It is a Normal whose variance is inverse-Gamma distributed; ν = 1 is the Cauchy, ν → ∞ the Normal. The KL is estimated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from bayeslim.io.registry import register
from bayeslim.noise import seeding_torch_from
from bayeslim.priors.learnable import Learnable


@register("prior")
@dataclass(frozen=True, repr=False)
class StudentT(Learnable):
    """Student's t with `df` degrees of freedom, around zero.

    Attributes:
        df: ν, the degrees of freedom.
        scale: s; not the standard deviation, which is s √(ν/(ν−2)) for ν > 2 and else infinite.
        samples: the number of draws that estimate the KL.
    """

    df: float | Tensor = 3.0
    scale: float | Tensor = 1.0
    samples: int = field(default=1, kw_only=True)
    name: ClassVar[str] = "student_t"
    limits: ClassVar = {"df": constraints.positive, "scale": constraints.positive}

    def log_prob(self, weight: Tensor) -> Tensor:
        """Compute −(ν+1)/2 log(1 + w²/(ν s²)) minus the log normaliser."""
        df, scale = self.setting_like("df", weight), self.setting_like("scale", weight)
        normaliser = torch.lgamma(df / 2) - torch.lgamma((df + 1) / 2) + 0.5 * (math.pi * df).log() + scale.log()
        return -0.5 * (df + 1) * torch.log1p((weight / scale).square() / df) - normaliser

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw weights of a shape."""
        draws = torch.empty(shape)
        df, scale = self.setting_like("df", draws), self.setting_like("scale", draws)
        with seeding_torch_from(generator):
            return torch.distributions.StudentT(df.expand(shape), scale=scale).sample()
