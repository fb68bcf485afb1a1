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
        if not std or not self.counts_in_noise(params):
            torch._foreach_add_(params, self.with_decay(group, params, grads), alpha=-lr)
            if std:
                self.add_noise_(params, params, std)
            return
        move, deviation = self.noise(params)
        unit = std / deviation
        # all that is small is added up first: next to the weights, their decay would be lost in rounding
        self.add_decay_(group, move, params, -lr / unit)
        torch._foreach_add_(move, grads, alpha=-lr / unit)
        torch._foreach_add_(params, move, alpha=unit)
