"""Stochastic gradient Langevin dynamics: gradient descent with noise.

    w ← w − lr ∇L(w) + √(2 lr T / N) ε          ε ~ N(0, 1)

With U = N L and the step size h = lr / N this is the Euler discretisation w ← w − h ∇U + √(2hT) ε of Langevin dynamics
(h is ε_t / 2 in the paper). In a direction of curvature λ of L the variance of the chain is the posterior's times
1 / (1 − lr λ / 2); minibatches add lr / 2 times the variance of their gradients, divided by λ.

Welling & Teh 2011
"""

from __future__ import annotations

import math
from typing import Any

import torch

from bayeslim.samplers.base import Sampler, Tensors


class Langevin(Sampler):
    """Stochastic gradient Langevin dynamics.

    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> sampler = Langevin([w], lr=0.1, num_data=100)
    >>> w.square().sum().backward()
    >>> sampler.step()
    """

    def update(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> None:
        """Descend, and add noise."""
        lr, std = group["lr"], math.sqrt(2 * group["lr"] * group["temperature"] / group["num_data"])
        # One sum, then one addition to the weights: a small decay would be lost in rounding next to a large weight.
        move = torch._foreach_mul(self.with_decay(group, params, grads), -lr)
        if std:
            torch._foreach_add_(move, self.noise(params), alpha=std)
        torch._foreach_add_(params, move)
