"""Divergences KL(N(μ, σ²) ‖ p) that depend on α = σ²/μ² alone, in closed form.

Each is a curve: its value and its slope in log α at every log α. Then ∂/∂log σ = 2 · slope and ∂/∂μ = −2 · slope / μ,
which is finite however small μ and σ are, and zero at μ = 0.

    relevance     ½ log(1 + 1/α)                                        automatic relevance determination
    sigmoid       ½ log(1 + 1/α) + k₁ s(−k₂ − k₃ log α)                 log-uniform, within 0.01 at every α
    polynomial    ½ (γ + log 2) − ½ log α − c₁ α − c₂ α² − c₃ α³        log-uniform, within 0.05 at α ≤ 1

(s is the logistic function). The polynomial is a fit at α ≤ 1; beyond, it keeps its value at 1.

Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369, equation 14 · Kingma, Salimans & Welling 2015, arXiv:1506.02557
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

EULER_GAMMA = 0.57721566490153286
LOG_UNIFORM_LIMIT = 0.5 * (EULER_GAMMA + math.log(2))
"""The limit of KL(N(μ, σ²) ‖ log-uniform) − log |μ|/σ as α → 0, if the KL goes to 0 as α → ∞."""

K1, K2, K3 = 0.63576, 1.87320, 1.48695
C1, C2, C3 = 1.16145124, -1.50204118, 0.58629921

Curve: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A function from log α to a divergence and its derivative."""


def divergence(curve: Curve, mean: Tensor, log_std: Tensor) -> Tensor:
    """Sum a divergence, a function of log α = 2 (log σ − log |μ|), over all weights.

    >>> divergence(relevance, torch.ones(3), torch.zeros(3))  # three times ½ log 2
    tensor(1.0397)
    """
    total: Tensor = _Divergence.apply(mean, log_std, curve)[0]
    return total


class _Divergence(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, log_std: Tensor, curve: Curve) -> tuple[Tensor, Tensor]:
        value, slope = curve(mean.abs().log_().sub_(log_std).mul_(-2))
        return value.sum(), slope

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Curve], output: tuple[Tensor, Tensor]) -> None:
        mean, log_std, ctx.curve = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(mean, log_std, output[1])

    @staticmethod
    def backward(ctx: Any, to_kl: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        mean, log_std, slope = ctx.saved_tensors
        size = mean.abs().clamp(min=torch.finfo(mean.dtype).tiny)
        if torch.is_grad_enabled():  # to be differentiated again
            _, slope = ctx.curve(2 * (log_std - size.log()))
        by_log_std = 2 * to_kl * slope
        return -by_log_std * mean.sign() / size, by_log_std, None


def relevance(log_alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ½ log(1 + 1/α)."""
    return 0.5 * torch.logaddexp(-log_alpha, torch.zeros_like(log_alpha)), -0.5 * torch.sigmoid(-log_alpha)


def relevance_and_limit(log_alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ½ log(1 + 1/α) + ½ (γ + log 2)."""
    value, slope = relevance(log_alpha)
    return value + LOG_UNIFORM_LIMIT, slope


def sigmoid(log_alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ½ log(1 + 1/α) + k₁ s(−k₂ − k₃ log α)."""
    value, slope = relevance(log_alpha)
    share = torch.sigmoid(-K2 - K3 * log_alpha)
    return value + K1 * share, slope - K1 * K3 * share * (1 - share)


def polynomial(log_alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ½ (γ + log 2) − ½ log α − c₁ α − c₂ α² − c₃ α³; constant beyond α = 1."""
    log_alpha, fitted = log_alpha.clamp(max=0), log_alpha <= 0
    alpha = log_alpha.exp()
    value = LOG_UNIFORM_LIMIT - 0.5 * log_alpha - alpha * (C1 + alpha * (C2 + alpha * C3))
    return value, (-0.5 - alpha * (C1 + alpha * (2 * C2 + alpha * 3 * C3))) * fitted
