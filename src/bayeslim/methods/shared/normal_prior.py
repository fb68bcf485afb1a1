"""Normal priors in few passes over the weights.

On a CPU, such passes dominate the step of a small network. The elementwise formula of a prior takes about ten of them,
forward and backward. A sum of squares takes one, its gradient −w/s² another, and weight decay in a sampler only one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.priors import Normal, Prior


def weight_decay(bnn: Bayesian) -> float | None:
    """Return λ = 1 / (s² N) for a sampler whose loss omits the prior.

    It is None unless the prior is N(0, s²) for all weights.

    For your own loop:

        sampler = bnn.optimizer(lr)
        sampler.param_groups[0]["weight_decay"] = bl.samplers.weight_decay(bnn)
        ...
        bnn.loss(batch, kl_weight=0).backward()
    """
    found = _plain(bnn)
    if found is None or len(set(found[0])) > 1:
        return None
    return 1 / (found[0][0] ** 2 * bnn.data_size())


def log_prior(bnn: Bayesian) -> Tensor:
    """Compute `bnn.log_prior()`, faster for simple Normal priors."""
    found = None if torch.compiler.is_compiling() else _plain(bnn)
    if found is None:
        return bnn.log_prior()
    value: Tensor = _NormalLogPrior.apply(found[0], *found[1])
    return value


def _plain(bnn: Bayesian) -> tuple[list[float], list[Tensor]] | None:
    """Return scales and weights if all priors are simple Normal ones, else None."""
    priors = {} if len(bnn.priors.learned) else bnn.priors.given
    stds = [_plain_scale(prior) for prior in priors.values()]
    weights: list[Tensor] = [bnn.model.get_parameter(name) for name in priors]
    precise = all(weight.dtype in (torch.float32, torch.float64) for weight in weights)
    if not stds or bnn.anchor is not None or not precise:
        return None
    plain = [std for std in stds if std is not None]
    return (plain, weights) if len(plain) == len(stds) else None


def _plain_scale(prior: Prior) -> float | None:
    simple = type(prior) is Normal and isinstance(prior.std, (int, float)) and isinstance(prior.mean, (int, float))
    return float(prior.std) if isinstance(prior, Normal) and simple and prior.mean == 0 else None


class _NormalLogPrior(torch.autograd.Function):
    """Σ log N(w | 0, s²) of tensors, each with its own s."""

    @staticmethod
    def forward(ctx: Any, stds: list[float], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        ctx.stds = stds
        counts = [weight.numel() for weight in weights]
        constant = sum(n * (math.log(s) + 0.5 * math.log(2 * math.pi)) for n, s in zip(counts, stds, strict=True))
        norms = torch._foreach_norm(weights)
        if len(set(stds)) > 1:
            norms = torch._foreach_div(norms, stds)
            return torch.stack(norms).square().sum() * -0.5 - constant
        return torch.stack(norms).square().sum() * (-0.5 / stds[0] ** 2) - constant

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        weights = ctx.saved_tensors
        if len(set(ctx.stds)) > 1:
            factors = [-upstream / std**2 for std in ctx.stds]
            return None, *(weight * factor for weight, factor in zip(weights, factors, strict=True))
        return None, *torch._foreach_mul(weights, -upstream / ctx.stds[0] ** 2)
