"""The Laplace prior p(w) = e^(−|w|/b) / 2b; its MAP estimate is the lasso.

    KL(N(μ, σ²) ‖ p) = E|w|/b + log 2b − ½ log 2πeσ²                          best b = mean of E|w|
    E|w| = μ erf(z/√2) + σ √(2/π) e^(−z²/2),      z = μ/σ

The derivatives of E|w| in μ and σ are the factors beside them: the terms through z cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from bayeslim.io.registry import register
from bayeslim.priors.base import LOG_GAUSSIAN_ENTROPY
from bayeslim.priors.learnable import Learnable


@register("prior")
@dataclass(frozen=True, repr=False)
class Laplace(Learnable):
    """Laplace(0, scale): a sharper peak and heavier tails than a Normal.

    Attributes:
        scale: b, the mean of |w|; the standard deviation is √2 b.
    """

    scale: float | Tensor = 1.0
    name: ClassVar[str] = "laplace"
    limits: ClassVar = {"scale": constraints.positive}
    closed_form: ClassVar[str | None] = "scale"

    def log_prob(self, weight: Tensor) -> Tensor:
        """Compute −|w|/b − log 2b."""
        scale = self.setting_like("scale", weight)
        return -weight.abs() / scale - (2 * scale).log()

    def kl(self, mean: Tensor, std: Tensor, log_std: Tensor | None = None) -> Tensor:
        """Compute Σ [E|w|/b + log 2b − ½ log 2πeσ²]."""
        log_std = std.log() if log_std is None else log_std
        scale = self.setting_like("scale", std)
        return (expected_absolute(mean, std) / scale + (2 * scale).log() - log_std - LOG_GAUSSIAN_ENTROPY).sum()

    def statistic(self, mean: Tensor, std: Tensor) -> Tensor:
        """Compute E|w| of every weight."""
        return expected_absolute(mean, std)

    def optimum(self, average: Tensor) -> Tensor:
        """Return the average itself."""
        return average

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw weights of a shape."""
        draws = torch.empty(shape).exponential_(generator=generator)
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return draws * signs * self.setting_like("scale", draws)


def expected_absolute(mean: Tensor, std: Tensor) -> Tensor:
    """Compute E|w| of w ~ N(mean, std²).

    It and its gradients are finite for every ratio of the two.

    >>> expected_absolute(torch.zeros(1), torch.ones(1))
    tensor([0.7979])
    """
    expected: Tensor = _ExpectedAbsolute.apply(mean, std)
    return expected


class _ExpectedAbsolute(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, std: Tensor) -> Tensor:
        by_mean, by_std = _slopes(mean, std)
        return mean * by_mean + std * by_std

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, to_output: Tensor) -> tuple[Tensor, Tensor]:
        by_mean, by_std = _slopes(*ctx.saved_tensors)
        return to_output * by_mean, to_output * by_std


def _slopes(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    z = mean / std
    return torch.erf(z * math.sqrt(0.5)), math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square())
