"""Preconditioned stochastic gradient Langevin dynamics: RMSprop with noise.

    V ← β V + (1 − β) ∇L²          G = 1 / (√V + ϵ)
    w ← w − lr G ∇L(w) + √(2 lr T G / N) ε

A G that goes on following the gradients depends on w, and the target is missed by the term Γ = Σ ∂G/∂w, which is dear
to compute and usually left out. A G that is fixed needs no such term. So it is measured for `adapt_steps`, the chain's
burn-in, and held from then on; None goes on for ever, as in the paper, with a bias. V starts from ∇L² + 1/N, about what
the posterior's own width makes of a gradient.

Li, Chen, Carlson & Carin 2016, arXiv:1512.07666
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from bayeslim.samplers.base import Sampler, Tensors


class PreconditionedLangevin(Sampler):
    """Langevin dynamics with a step size for every weight.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate, as of RMSprop.
        num_data: N.
        decay: β.
        floor: ϵ, the least root mean square of a gradient that counts.
        adapt_steps: how many steps V is measured for; None for all.
        **settings: those of every sampler, `temperature`, `weight_decay` and `masks`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        num_data: int,
        decay: float = 0.99,
        floor: float = 1e-5,
        adapt_steps: int | None = None,
        **settings: Any,
    ):
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1). Got {decay}.")
        own: dict[str, Any] = {"decay": decay, "floor": floor, "adapt_steps": adapt_steps, "steps": 0}
        super().__init__(params, lr, num_data=num_data, **own, **settings)

    def update(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> None:
        """Measure, descend by G, and add noise by √G."""
        grads = self.with_decay(group, params, grads)
        squares, roots = self.buffers(params, "square"), self.buffers(params, "root_scale")
        if group["adapt_steps"] is None or group["steps"] < group["adapt_steps"] or not group["steps"]:
            share = 1 - group["decay"] if group["steps"] else 1.0
            torch._foreach_mul_(squares, 1 - share)
            torch._foreach_addcmul_(squares, grads, grads, value=share)
            if not group["steps"]:  # of all the data at an optimum gradients vanish, and the first noise would be huge
                torch._foreach_add_(squares, 1 / group["num_data"])
            scale = torch._foreach_sqrt(squares)
            torch._foreach_add_(scale, group["floor"])
            torch._foreach_copy_(roots, torch._foreach_pow(scale, -0.5))
        group["steps"] += 1
        drift = torch._foreach_mul(grads, roots)
        torch._foreach_mul_(drift, -group["lr"])
        if group["temperature"]:
            std = math.sqrt(2 * group["lr"] * group["temperature"] / group["num_data"])
            torch._foreach_add_(drift, self.noise(params), alpha=std)
        torch._foreach_addcmul_(params, drift, roots)
