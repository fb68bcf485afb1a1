"""Adversarial inputs: small changes of an input that raise the loss of the mean network.

    FGSM   x + ε sign(∇_x ℓ)                                              one step
    PGD    x ← Π_{‖x − x₀‖_∞ ≤ ε} (x + η sign(∇_x ℓ)),   η = 2.5 ε / steps    many small ones, from a random start

A posterior that knows what it does not know is less sure of such inputs: compare the entropies before and after.

Goodfellow, Shlens & Szegedy 2015, arXiv:1412.6572 · Madry et al. 2018, arXiv:1706.06083
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.likelihoods import Likelihood
from bayeslim.replica import replicate
from bayeslim.types import call


def fgsm(
    network: Bayesian | nn.Module,
    x: Tensor,
    y: Tensor,
    epsilon: float,
    bounds: tuple[float, float] | None = None,
    *,
    likelihood: Likelihood | None = None,
) -> Tensor:
    """Move inputs by ε against the mean network, in one step.

    Args:
        network: a Bayesian network, or a plain one.
        x: inputs.
        y: their targets.
        epsilon: the distance in every component.
        bounds: the range of valid inputs, such as (0, 1) for images.
        likelihood: what the outputs of a plain network mean.
    """
    return _clipped(x + epsilon * _slope(network, x, y, likelihood).sign(), bounds)


def pgd(
    network: Bayesian | nn.Module,
    x: Tensor,
    y: Tensor,
    epsilon: float,
    bounds: tuple[float, float] | None = None,
    *,
    steps: int = 10,
    likelihood: Likelihood | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Move inputs by at most ε against the mean network, in many small steps.

    Args:
        network: a Bayesian network, or a plain one.
        x: inputs.
        y: their targets.
        epsilon: the largest distance in every component.
        bounds: the range of valid inputs, such as (0, 1) for images.
        steps: the number of steps.
        likelihood: what the outputs of a plain network mean.
        generator: of the random start.
    """
    noise = torch.rand(x.shape, dtype=x.dtype, generator=generator).to(x.device)
    at = _clipped(x + epsilon * (2 * noise - 1), bounds)
    for _ in range(steps):
        at = at + 2.5 * epsilon / steps * _slope(network, at, y, likelihood).sign()
        at = _clipped(x + (at - x).clamp(-epsilon, epsilon), bounds)
    return at


def _slope(network: Bayesian | nn.Module, x: Tensor, y: Tensor, likelihood: Likelihood | None) -> Tensor:
    if isinstance(network, Bayesian):
        likelihood = network.likelihood
    elif likelihood is None:
        raise TypeError(
            "An attack on a network that is not Bayesian needs likelihood=bl.likelihoods.Categorical(), or another one."
        )
    with torch.enable_grad():
        at = x.detach().clone().requires_grad_()
        outputs = network.replica(x)(at) if isinstance(network, Bayesian) else call(replicate(network), at)
        (slope,) = torch.autograd.grad(-likelihood.log_prob(outputs, y).sum(), [at])
    return slope


def _clipped(x: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    return x if bounds is None else x.clamp(*bounds)
