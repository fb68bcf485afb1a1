"""Averages over draws of networks: moments, probabilities and entropies, each in the way that suits the device.

A GPU wants few calls; a CPU passes that run along memory, and few calls where there are few values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayeslim.blas import IS_ARM

LOWEST = -1e4
"""Logits are raised to this far below the largest one: their exponential is zero, and zero times it is zero too."""
FEW = 2**10
"""Of how many values calls take longer than what they compute."""
SOME = 2**13 if IS_ARM else 2**12
"""Of how many values of classes bringing them to the front takes longer than it saves."""


def moments_over_draws(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over the first dimension: on a CPU in passes, which it makes many times faster than `var`.

    Of few values one call is quicker on ARM all the same.
    """
    if values.is_cuda or (IS_ARM and values.numel() <= FEW):
        variance, mean = torch.var_mean(values, 0, correction=0)
        return mean, variance
    mean = values.mean(0)
    away = values - mean
    return mean, away.mul_(away).mean(0)


def entropy_of(probs: Tensor, dim: int = -1) -> Tensor:
    """−Σ p log p over the classes, in nats."""
    entropy: Tensor = torch.special.entr(probs).sum(dim)
    return entropy


def _softmax_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """P = softmax(f) over the first dimension, and H = log Σ exp f − Σ p f, where exponentials are taken once."""
    below = (logits - logits.amax(0, keepdim=True)).clamp_min(LOWEST)
    weights = below.exp()
    total = weights.sum(0)
    entropy = total.log() - (below * weights).sum(0) / total
    return weights / total, entropy


def class_averages(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of class probabilities, (S, ..., C), over draws: mean, variance, the mean's entropy, and the mean entropy."""
    return _in_few_calls(logits) if logits.is_cuda or logits.numel() <= SOME else _along_memory(logits)


def _in_few_calls(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    probs = logits.softmax(-1)
    mean, variance = moments_over_draws(probs)
    return mean, variance, entropy_of(mean), entropy_of(probs).mean(0)


def _along_memory(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With the classes in front, which halves the time of sums over them on a CPU."""
    probs, entropies = _softmax_and_entropy(logits.movedim(-1, 0).contiguous())
    mean = probs.mean(1)
    variance = (probs - mean.unsqueeze(1)).square_().mean(1)
    entropy, mean, variance = entropy_of(mean, 0), mean.movedim(0, -1), variance.movedim(0, -1)
    return mean.contiguous(), variance.contiguous(), entropy, entropies.mean(0)
