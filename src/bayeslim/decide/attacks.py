"""Adversarial inputs: small changes of an input that raise the loss of the mean network.

    FGSM   x + ε sign(∇_x ℓ)                                              one step
    PGD    x ← Π_{‖x − x₀‖_∞ ≤ ε} (x + η sign(∇_x ℓ)),   η = 2.5 ε / steps    many small ones, from a random start

With `samples`, the average of drawn networks is attacked, which is the prediction itself; where weights have mean zero
there is nothing else to attack. A posterior that knows what it does not know is less sure of such inputs: compare the
entropies before and after.

Goodfellow, Shlens & Szegedy 2015, arXiv:1412.6572 · Madry et al. 2018, arXiv:1706.06083
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import NotFinite, check_number, check_whole
from bayeslim.likelihoods import Likelihood
from bayeslim.noise import drawing_from, on_device
from bayeslim.replica import replicate
from bayeslim.types import call


def fgsm(
    network: Bayesian | nn.Module,
    x: Tensor,
    y: Tensor,
    epsilon: float,
    bounds: tuple[float, float] | None = None,
    *,
    samples: int | None = None,
    likelihood: Likelihood | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Move inputs by ε against the mean network, in one step.

    Args:
        network: a Bayesian network, or a plain one.
        x: inputs.
        y: their targets.
        epsilon: the distance in every component.
        bounds: the range of valid inputs, such as (0, 1) for images.
        samples: attack the average of so many drawn networks instead of the mean network.
        likelihood: what the outputs of a plain network mean.
        generator: of the draws.
    """
    _check(network, x, y, epsilon, bounds, samples, likelihood)
    return _clipped(x + epsilon * _slope(network, x, y, likelihood, samples, generator).sign(), bounds)


def pgd(
    network: Bayesian | nn.Module,
    x: Tensor,
    y: Tensor,
    epsilon: float,
    bounds: tuple[float, float] | None = None,
    *,
    steps: int = 10,
    samples: int | None = None,
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
        samples: attack the average of so many drawn networks, new ones in every step, instead of the mean network.
        likelihood: what the outputs of a plain network mean.
        generator: of the random start and of the draws.
    """
    _check(network, x, y, epsilon, bounds, samples, likelihood)
    check_whole("steps", steps)
    noise = torch.rand(x.shape, dtype=x.dtype, generator=generator).to(x.device)
    at = _clipped(x + epsilon * (2 * noise - 1), bounds)
    for _ in range(steps):
        at = at + 2.5 * epsilon / steps * _slope(network, at, y, likelihood, samples, generator).sign()
        at = _clipped(x + (at - x).clamp(-epsilon, epsilon), bounds)
    return at


def _check(
    network: Any, x: Any, y: Any, epsilon: Any, bounds: Any, samples: Any, likelihood: Likelihood | None
) -> None:
    """Refuse attacks that mean nothing."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"An attack needs a Bayesian network or a torch.nn.Module. Got {type(network).__name__}.")
    if not isinstance(network, Bayesian) and not isinstance(likelihood, Likelihood):
        raise TypeError(
            "An attack on a network that is not Bayesian needs likelihood=bl.likelihoods.Categorical(), or another "
            f"one. Got {likelihood!r}."
        )
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor. Got {type(value).__name__}. Use torch.as_tensor(...).")
        if not bool(value.isfinite().all()):
            raise NotFinite(f"{name} holds NaN or infinite values, and an attack on them means nothing.")
    if not x.is_floating_point():
        raise TypeError(f"x must hold real numbers, which can change a little. Got {x.dtype}. Pass x.float().")
    check_number("epsilon", epsilon, least=0)
    if samples is not None:
        check_whole("samples", samples)
    if bounds is not None:
        if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
            raise TypeError(f"bounds must be the lowest and the highest value, such as (0, 1). Got {bounds!r}.")
        for bound in bounds:
            check_number("bounds", bound)
        if not bounds[0] < bounds[1]:
            raise ValueError(f"bounds must be the lowest and the highest value, such as (0, 1). Got {bounds!r}.")


def _slope(
    network: Bayesian | nn.Module,
    x: Tensor,
    y: Tensor,
    likelihood: Likelihood | None,
    samples: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    if isinstance(network, Bayesian):
        likelihood = network.likelihood
    assert likelihood is not None
    with torch.enable_grad(), drawing_from(on_device(generator, x.device)):
        at = x.detach().clone().requires_grad_()
        if not isinstance(network, Bayesian):
            outputs = [call(replicate(network), at)]
        elif samples is None:
            outputs = [network.replica(x)(at)]
        else:
            twin = network.replica(x)
            outputs = [twin.method.draw(twin, at) for _ in range(samples)]
        log_prob = torch.stack([likelihood.log_prob(one, y) for one in outputs]).logsumexp(0)
        (slope,) = torch.autograd.grad(-log_prob.sum(), [at])
    return slope


def _clipped(x: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    return x if bounds is None else x.clamp(*bounds)
