"""Adversarial inputs: small changes of an input that raise the loss of the mean network.

    FGSM   x + ε sign(∇_x ℓ)                                              one step
    PGD    x ← Π_{‖x − x₀‖_∞ ≤ ε} (x + η sign(∇_x ℓ)),   η = 2.5 ε / steps    many small ones, from a random start

A posterior that knows what it does not know is less sure of such inputs: compare the entropies before and after.

Goodfellow, Shlens & Szegedy 2015, arXiv:1412.6572 · Madry et al. 2018, arXiv:1706.06083
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian


def fgsm(bnn: Bayesian, x: Tensor, y: Tensor, epsilon: float, bounds: tuple[float, float] | None = None) -> Tensor:
    """Move inputs by ε against the mean network, in one step.

    Args:
        bnn: the network.
        x: inputs.
        y: their targets.
        epsilon: the distance in every component.
        bounds: the range of valid inputs, such as (0, 1) for images.
    """
    return _clipped(x + epsilon * _slope(bnn, x, y).sign(), bounds)


def pgd(
    bnn: Bayesian,
    x: Tensor,
    y: Tensor,
    epsilon: float,
    bounds: tuple[float, float] | None = None,
    *,
    steps: int = 10,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Move inputs by at most ε against the mean network, in many small steps.

    Args:
        bnn: the network.
        x: inputs.
        y: their targets.
        epsilon: the largest distance in every component.
        bounds: the range of valid inputs, such as (0, 1) for images.
        steps: the number of steps.
        generator: of the random start.
    """
    noise = torch.rand(x.shape, dtype=x.dtype, generator=generator).to(x.device)
    at = _clipped(x + epsilon * (2 * noise - 1), bounds)
    for _ in range(steps):
        at = at + 2.5 * epsilon / steps * _slope(bnn, at, y).sign()
        at = _clipped(x + (at - x).clamp(-epsilon, epsilon), bounds)
    return at


def _slope(bnn: Bayesian, x: Tensor, y: Tensor) -> Tensor:
    twin = bnn.replica(x)
    with torch.enable_grad():
        at = x.detach().clone().requires_grad_()
        loss = -bnn.likelihood.log_prob(twin(at), y).sum()
        (slope,) = torch.autograd.grad(loss, [at])
    return slope


def _clipped(x: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    return x if bounds is None else x.clamp(*bounds)
