"""Stochastic gradient Langevin dynamics: gradient descent with noise, whose iterates are draws from the posterior.

    w ← w − lr ∇L(w) + √(2 lr T / N) ε          ε ~ N(0, 1),  L = mean NLL − log p(w) / N

With U = N L and the step size h = lr / N this is the Euler discretisation w ← w − h ∇U + √(2hT) ε of Langevin dynamics
(h is ε_t / 2 in the paper). In a direction of curvature λ of L, the variance of the chain is the posterior's times
1 / (1 − lr λ / 2). Minibatches add lr / 2 times the variance of their gradients, divided by λ.

Welling & Teh 2011 · cyclical: Zhang et al. 2020, arXiv:1902.03932
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bayeslim.io.registry import register
from bayeslim.methods.shared.chain_method import ChainMethod
from bayeslim.methods.shared.sampler import Sampler, Tensors


class Langevin(Sampler):
    """Stochastic gradient Langevin dynamics, as an optimizer.

    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> sampler = Langevin([w], lr=0.1, num_data=100)
    >>> w.square().sum().backward()
    >>> sampler.step()
    """

    def update(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> None:
        """Descend and add noise."""
        lr, std = group["lr"], math.sqrt(2 * group["lr"] * group["temperature"] / group["num_data"])
        # One sum, then one addition to the weights: next to a large weight, a small decay would be lost in rounding.
        move = torch._foreach_mul(self.with_decay(group, params, grads), -lr)
        if std:
            torch._foreach_add_(move, self.noise(params), alpha=std)
        torch._foreach_add_(params, move)


@register("method")
@dataclass(frozen=True)
class SGLD(ChainMethod):
    """Stochastic gradient Langevin dynamics; settings as in `ChainMethod`."""

    name: ClassVar[str] = "sgld"
    usual_lr: ClassVar[float] = 0.1

    def sampler(self, params: Any, lr: float, burn_in_steps: int | None, **settings: Any) -> Sampler:
        """Make the Langevin optimizer."""
        return Langevin(params, lr, **settings)
