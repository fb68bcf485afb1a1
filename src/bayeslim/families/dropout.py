"""Multiplicative noise: Gaussian dropout, and dropout whose rates are learned.

    w = μ (1 + √α ε),  ε ~ N(0, 1)      q(w) = N(w | μ, α μ²)      α = p/(1 − p),  p the probability of a drop

Dropping a weight with probability p and scaling the others by 1/(1 − p) has this mean and variance. With α fixed it is
Gaussian dropout; with α learned under `priors.LogUniform`, whose KL depends on α alone, variational dropout: one α for
every weight, output unit or layer, and in its first form none above 1, where the noise is as large as the signal.
`SparseGaussian`, which trains σ itself, has gradients of less variance at large α.

At an upper limit the gradient of log α is that of the best feasible step: zero if it points beyond the limit.

Srivastava et al. 2014, "Dropout" · Kingma, Salimans & Welling 2015, arXiv:1506.02557
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from bayeslim.errors import check_settings
from bayeslim.families.base import add_parameter, precise_dtype
from bayeslim.families.diagonal import DiagonalGaussian, IndependentWeights
from bayeslim.io.registry import register
from bayeslim.sites import owner, tensor_at


@register("family")
@dataclass(frozen=True)
class DropoutGaussian(DiagonalGaussian):
    """Independent Gaussians whose spread is a share of their size, σ = √α |μ|.

    A weight that is zero has no noise, and other priors than those of α alone (`priors.LogUniform`,
    `priors.RelevanceDetermination`) keep weights away from there: log σ is part of their KL. Weights that share an α
    have the same signal-to-noise ratio: prune those by criterion="magnitude".

    Attributes:
        rate: p, the initial or fixed probability of a *drop*; 0.5 unless `alpha` is given.
        alpha: instead, α = p/(1 − p), the variance of the noise on a weight of size 1.
        per: the group that shares an α: a "weight" alone; a "unit", an output of a layer (in general a row of a
            parameter); or a "layer", a whole parameter.
        learn: whether α is trained.
        largest: the largest α, such as 1.0 for the original variational dropout.
    """

    rate: float | None = None
    alpha: float | None = None
    per: Literal["weight", "unit", "layer"] = "weight"
    learn: bool = True
    largest: float | None = None
    initial_std: float = field(default=0.0, init=False, repr=False)
    name: ClassVar[str] = "dropout"
    suffix: ClassVar[str] = "_log_alpha"
    suffixes: ClassVar[tuple[str, ...]] = ("_log_alpha",)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.rate is not None and self.alpha is not None:
            raise ValueError(f"Give rate=p or alpha=p/(1 − p), not both. Got rate={self.rate}, alpha={self.alpha}.")
        if self.rate is not None and not 0 < self.rate < 1:
            raise ValueError(f"rate is the probability of a drop and must be between 0 and 1. Got {self.rate}.")
        for setting in ("alpha", "largest"):
            value = getattr(self, setting)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{setting} is a ratio of variances, σ²/μ², and must be positive. Got {value}.")
        if self.per not in ("weight", "unit", "layer"):
            raise ValueError(f'per must be "weight", "unit" or "layer". Got {self.per!r}.')
        if self.largest is not None and self.initial_log_alpha > math.log(self.largest):
            raise ValueError(
                f"α starts at {math.exp(self.initial_log_alpha):g}, above largest={self.largest:g}. Give a smaller "
                "rate or alpha."
            )

    @property
    def initial_log_alpha(self) -> float:
        """The initial log α."""
        if self.alpha is not None:
            return math.log(self.alpha)
        rate = 0.5 if self.rate is None else self.rate
        return math.log(rate) - math.log1p(-rate)

    def register(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Add log α to every parameter's module; a fixed one is a buffer."""
        for name in names:
            module, leaf = owner(model, name)
            mean = model.get_parameter(name)
            start = mean.new_full(self._shape(module, mean), self.initial_log_alpha, dtype=precise_dtype(mean))
            if self.learn:
                add_parameter(model, name + self.suffix, start)
            else:
                module.register_buffer(leaf + self.suffix, start)

    def _shape(self, module: nn.Module, mean: Tensor) -> list[int]:
        if self.learn and self.per == "weight":
            return list(mean.shape)
        shape = [1] * mean.ndim
        if self.learn and self.per == "unit" and shape:
            outputs = 1 if isinstance(module, _ConvTransposeNd) and mean.ndim > 1 else 0
            shape[outputs] = mean.shape[outputs]
        return shape

    def log_alpha_of(self, module: nn.Module, leaf: str) -> Tensor | None:
        """Return the log α of a parameter, which broadcasts to it; None if not random."""
        log_alpha: Tensor | None = getattr(module, leaf + self.suffix, None)
        if log_alpha is None or self.largest is None:
            return log_alpha
        limited: Tensor = _Limited.apply(log_alpha, math.log(self.largest))
        return limited

    def log_std_of(self, module: nn.Module, leaf: str) -> Tensor | None:
        """Compute log σ = ½ log α + log |μ|."""
        log_alpha = self.log_alpha_of(module, leaf)
        if log_alpha is None:
            return None
        size: Tensor = getattr(module, leaf).to(log_alpha.dtype).abs()
        # The square of a smaller number underflows to zero; a weight that is exactly zero has a gradient of zero.
        smallest = math.sqrt(torch.finfo(size.dtype).tiny)
        return 0.5 * log_alpha + size.clamp(min=smallest).log()

    def std(self, model: nn.Module, name: str) -> Tensor:
        """Compute σ of a parameter, differentiable; exactly zero where μ is."""
        log_alpha = self.log_alpha_of(*owner(model, name))
        assert log_alpha is not None, name
        return (0.5 * log_alpha).exp() * tensor_at(model, name).to(log_alpha.dtype).abs()

    def density(self, model: nn.Module, names: tuple[str, ...], masks: Mapping[str, Tensor]) -> IndependentWeights:
        """Build q at the present parameters, differentiable."""
        q = super().density(model, names, masks)
        cut = {n: q.log_stds[n].masked_fill(~mask, -math.inf) for n, mask in masks.items() if n in q.log_stds}
        return IndependentWeights(q.means, q.log_stds | cut, masks) if cut else q


class _Limited(torch.autograd.Function):
    """min(x, limit), with the gradient of a projected step."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, limit: float) -> Tensor:
        return x.clamp(max=limit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        x, limit = inputs
        ctx.save_for_backward(x >= limit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (at_limit,) = ctx.saved_tensors
        return torch.where(at_limit, grad.clamp(min=0), grad), None
