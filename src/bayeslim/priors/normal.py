"""The Normal prior, in closed form.

KL(N(μ, σ²) ‖ N(m, s²)) = ½ [((μ − m)² + σ²)/s² − 1 − log(σ²/s²)]        best s² = mean of (μ − m)² + σ²
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from bayeslim.io.registry import register
from bayeslim.priors.base import MANY_WEIGHTS
from bayeslim.priors.learnable import Learnable


@register("prior")
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
    limits: ClassVar = {"std": constraints.positive, "mean": constraints.real}
    closed_form: ClassVar[str | None] = "std"

    def log_prob(self, weight: Tensor) -> Tensor:
        """Compute −½ ((w − m)/s)² − log s − ½ log 2π."""
        std, mean = self.setting_like("std", weight), self.setting_like("mean", weight)
        return -0.5 * ((weight - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)

    def log_density(self, weights: Sequence[Tensor]) -> Tensor:
        """Compute −½ Σ ‖w − m‖² / s² − N (log s + ½ log 2π).

        A sum of squares takes few passes over the weights, which are most of a small network's step on a CPU.
        """
        std = self.setting_like("std", weights[0])
        if std.ndim:
            return super().log_density(weights)
        is_centred = not isinstance(self.mean, Tensor) and self.mean == 0
        offs = weights if is_centred else [weight - self.setting_like("mean", weight) for weight in weights]
        squares = torch.stack([_sum_of_squares(off) for off in offs]).sum()
        count = sum(weight.numel() for weight in weights)
        return -0.5 * squares / std.square() - count * (std.log() + 0.5 * math.log(2 * math.pi))

    def kl(self, mean: Tensor, std: Tensor, log_std: Tensor | None = None) -> Tensor:
        """Compute ½ Σ [((μ − m)² + σ²)/s² − 1 − log(σ²/s²)]."""
        log_std = std.log() if log_std is None else log_std
        scale = self.setting_like("std", std)
        off = (mean - self.setting_like("mean", std)) / scale
        return 0.5 * (off.square() + (std / scale).square() - 1).sum() - (log_std - scale.log()).sum()

    def weights(
        self, means: Sequence[Tensor], log_stds: Sequence[Tensor], squared: Sequence[bool]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
        """Compute μ, σ or σ², and the KL in one node, with few passes over the weights."""
        varies = isinstance(self.std, Tensor) or isinstance(self.mean, Tensor)
        mixed = any(mean.dtype != log_std.dtype for mean, log_std in zip(means, log_stds, strict=True))
        if varies or mixed or torch.compiler.is_compiling():  # a compiler fuses them itself
            return super().weights(means, log_stds, squared)
        # Apart, each parameter of a large network gets its gradient as soon as it is ready.
        large = sum(mean.numel() for mean in means) >= MANY_WEIGHTS
        groups = [[k] for k in range(len(means))] if large else [list(range(len(means)))]
        found = [self._joined(*([part[k] for k in group] for part in (means, log_stds, squared))) for group in groups]
        kls = [kl for _, _, kl in found]
        kl = kls[0] if len(kls) == 1 else torch.stack(kls).sum()
        return [m for ms, _, _ in found for m in ms], [s for _, ss, _ in found for s in ss], kl

    def _joined(
        self, means: list[Any], log_stds: list[Any], squared: list[Any]
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        *values, kl = _NormalWeights.apply(float(self.mean), float(self.std), tuple(squared), *means, *log_stds)
        return values[: len(means)], values[len(means) :], kl

    def statistic(self, mean: Tensor, std: Tensor) -> Tensor:
        """Compute E (w − m)² of every weight."""
        return (mean - self.setting_like("mean", mean)).square() + std.square()

    def optimum(self, average: Tensor) -> Tensor:
        """Take the root of the mean square."""
        return average.sqrt()

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw weights of a shape."""
        draws = torch.randn(shape, generator=generator)
        return draws * self.setting_like("std", draws) + self.setting_like("mean", draws)


class _NormalWeights(torch.autograd.Function):
    """(μ, log σ) ↦ (μ, σ or σ², KL(N(μ, σ²) ‖ N(m, s²))) of several parameters.

    The backward pass adds the KL's own gradients, (μ − m)/s² and σ²/s² − 1 in log σ, to those of the data in the same
    operation. This saves passes over the weights, which dominate a training step of a small network on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, centre: float, scale: float, squared: tuple[bool, ...], *values: Tensor) -> Any:
        means, log_stds = values[: len(squared)], values[len(squared) :]
        # The exponential of 2 is a third quicker than the natural one.
        powers = [(2 if square else 1) / math.log(2) for square in squared]
        spreads = torch._foreach_mul(log_stds, powers)
        for spread in spreads:
            spread.exp2_()
        ctx.save_for_backward(*means, *spreads)
        ctx.centre, ctx.scale, ctx.squared = centre, scale, squared
        squares = [_sum_of_squares(mean - centre if centre else mean) for mean in means]
        squares += [s.sum() if square else _sum_of_squares(s) for s, square in zip(spreads, squared, strict=True)]
        logs = torch.stack([log_std.sum() for log_std in log_stds]).sum()
        constant = sum(mean.numel() for mean in means) * (0.5 - math.log(scale))
        kl = 0.5 / scale**2 * torch.stack(squares).sum() - logs - constant
        return *means, *spreads, kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        count, saved = len(ctx.squared), ctx.saved_tensors
        to_means, to_spreads, to_kl = grads[:count], grads[count:-1], grads[-1]
        precision, minus = to_kl / ctx.scale**2, -to_kl
        means, spreads = saved[:count], saved[count:]
        offs = [mean - ctx.centre for mean in means] if ctx.centre else means
        found_means = torch._foreach_addcmul([_dense(g) for g in to_means], offs, [precision] * count)
        slopes = []
        for spread, grad, square in zip(spreads, to_spreads, ctx.squared, strict=True):
            # In log σ the data's gradient is σ times that in σ, and 2 σ² times that in σ².
            if square:
                slopes.append(torch.add(precision, _dense(grad), alpha=2))
            else:
                slopes.append(torch.addcmul(_dense(grad), spread, precision))
        found_logs = torch._foreach_addcmul([minus] * count, spreads, slopes)
        return None, None, None, *found_means, *found_logs


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def _sum_of_squares(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.dot(flat, flat)
