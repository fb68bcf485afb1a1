"""The Normal prior, in closed form.

KL(N(μ, σ²) ‖ N(m, s²)) = ½ [((μ − m)² + σ²)/s² − 1 − log(σ²/s²)]        best s² = mean of (μ − m)² + σ²
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.constraints import Constraint

from bayeslim.priors.learnable import Learnable


@dataclass(frozen=True, repr=False)
class Normal(Learnable):
    """N(mean, std²); a Gaussian prior is weight decay.

    Attributes:
        std: the *standard deviation*, a number or a tensor that broadcasts to the parameter. A tensor of the
            parameter's shape learned in closed form is automatic relevance determination.
        mean: the centre, likewise.
    """

    std: float | Tensor = 1.0
    mean: float | Tensor = 0.0
    name: ClassVar[str] = "normal"
    closed_form: ClassVar[str | None] = "std"

    def hyperparameters(self) -> Mapping[str, Constraint]:
        """What the hyperparameters may be."""
        return {"std": constraints.positive, "mean": constraints.real}

    def log_prob(self, weight: Tensor) -> Tensor:
        """−½ ((w − m)/s)² − log s − ½ log 2π."""
        std, mean = self.setting_like("std", weight), self.setting_like("mean", weight)
        return -0.5 * ((weight - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)

    def kl(self, mean: Tensor, std: Tensor, log_std: Tensor | None = None) -> Tensor:
        """½ Σ [((μ − m)² + σ²)/s² − 1 − log(σ²/s²)]."""
        log_std = std.log() if log_std is None else log_std
        scale = self.setting_like("std", std)
        off = (mean - self.setting_like("mean", std)) / scale
        return 0.5 * (off.square() + (std / scale).square() - 1).sum() - (log_std - scale.log()).sum()

    def weights(self, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """μ, σ and the KL, with all their gradients in as few passes over the weights as there are."""
        varies = isinstance(self.std, Tensor) or isinstance(self.mean, Tensor)
        if varies or mean.dtype != log_std.dtype or torch.compiler.is_compiling():  # a compiler joins them by itself
            return super().weights(mean, log_std)
        found: tuple[Tensor, Tensor, Tensor] = _NormalWeights.apply(mean, log_std, float(self.mean), float(self.std))
        return found

    def statistic(self, mean: Tensor, std: Tensor) -> Tensor:
        """E (w − m)² of every weight."""
        return (mean - self.setting_like("mean", mean)).square() + std.square()

    def optimum(self, average: Tensor) -> Tensor:
        """The root of the mean square."""
        return average.sqrt()

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw weights of a shape."""
        draws = torch.randn(shape, generator=generator)
        return draws * self.setting_like("std", draws) + self.setting_like("mean", draws)


class _NormalWeights(torch.autograd.Function):
    """(μ, log σ) ↦ (μ, σ, KL(N(μ, σ²) ‖ N(m, s²)) summed).

    The KL's own gradients, (μ − m)/s² and σ²/s² − 1 in log σ, are added to those of the data on their way to the
    parameters: on a CPU a step of a small network is made of such passes over the weights.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, centre: float, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        std = log_std.exp()
        ctx.save_for_backward(mean, std)
        ctx.centre, ctx.scale = centre, scale
        squares = _sum_of_squares(mean - centre if centre else mean) + _sum_of_squares(std)
        kl = 0.5 / scale**2 * squares - log_std.sum() - mean.numel() * (0.5 - math.log(scale))
        return mean.view_as(mean), std, kl

    @staticmethod
    def backward(ctx: Any, to_mean: Tensor, to_std: Tensor, to_kl: Tensor) -> tuple[Tensor, Tensor, None, None]:
        mean, std = ctx.saved_tensors
        to_mean, to_std = (g.to_dense() if g.is_sparse else g for g in (to_mean, to_std))
        precision = to_kl / ctx.scale**2
        off = mean - ctx.centre if ctx.centre else mean
        to_log_std = torch.addcmul(to_std, std, precision) * std
        return torch.addcmul(to_mean, off, precision), to_log_std.sub_(to_kl), None, None


def _sum_of_squares(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.dot(flat, flat)
