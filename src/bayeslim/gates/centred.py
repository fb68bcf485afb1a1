"""Log-normal scales, and centred ones: z is the scale of the weights' prior, w | z ~ N(0, z²).

The divergence of the weights is taken in expectation over z. With log z ~ N(m, v),

    E KL(N(μ, σ²) ‖ N(0, z²)) = ½ (μ² + σ²) e^(−2m + 2v) + m − log σ − ½,

since E z⁻² = e^(−2m + 2v). This is why centred scales are log-normal: of a Gaussian z, E z⁻² does not exist.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeslim.errors import UnsupportedModel
from bayeslim.gates.base import Gate, bounded_exp
from bayeslim.priors import Normal, Prior


def log_normal_mean(log_z: Tensor, variance: Tensor) -> Tensor:
    """Compute E z = e^(m + v/2)."""
    return bounded_exp(log_z + 0.5 * variance)


def log_normal_variance(log_z: Tensor, variance: Tensor) -> Tensor:
    """Compute (e^v − 1) e^(2m + v) by logarithms, since a factor may overflow."""
    return bounded_exp(2 * log_z + 2 * variance + torch.log(-torch.expm1(-variance)))


def centred_kl(
    gate: Gate, log_z: Tensor, variance: Tensor, mean: Tensor, std: Tensor | None, groups: Tensor, prior: Prior
) -> Tensor:
    """Compute E_z KL(N(μ, σ²) ‖ N(0, z² s²)), summed over the weights.

    `log_z` and `variance` are the moments of log z, (count,), s is the standard deviation of the network's Normal
    prior, and all else is as in `Gate.weight_kl`.
    """
    if not isinstance(prior, Normal):
        raise UnsupportedModel(
            f"{type(gate).__name__}(centred=True) makes z the scale of a Normal prior. "
            f"Got prior={prior!r}. Pass prior=priors.Normal(1.0), or centred=False."
        )
    weight = mean.to(log_z.dtype)
    square = (weight - prior.setting_like("mean", weight)).square()
    offset = torch.full_like(weight, 0.5 * math.log(2 * math.pi))
    if std is not None:
        square, offset = square + std.square(), -0.5 - std.log()
    scale = prior.setting_like("std", weight)
    energy = 0.5 * (square / scale.square()) * bounded_exp((-2 * log_z + 2 * variance)[groups])
    return (energy + log_z[groups] + scale.log() + offset).sum()
