"""Preconditioned stochastic gradient Langevin dynamics: RMSprop with noise, whose iterates follow the posterior.

    V ← β V + (1 − β) ∇L²          G = 1 / (√V + a + ϵ)
    w ← w − lr G ∇L(w) + √(2 lr T G / N) ε

If G keeps following the gradients it depends on w, and the chain misses its target by the term Γ = Σ ∂G/∂w, which is
expensive and usually left out. A fixed G needs no such term. So V is measured during the burn-in (`adapt_steps`) and
fixed afterwards; None measures it for the whole run, as the paper does, with a bias. V starts from ∇L² + 1/N, about the
squared gradient that the posterior's own width causes. The paper has no a, which is a tenth of the average √V of a
tensor: weights without gradients in the burn-in, such as those of an idle unit, would take huge steps later.

Li, Chen, Carlson & Carin 2016, arXiv:1512.07666
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bayeslim.bayesian import Bayesian
from bayeslim.io.registry import register
from bayeslim.methods.shared.chain_method import ChainMethod
from bayeslim.methods.shared.sampler import Sampler, Tensors
from bayeslim.methods.shared.steepness import relative_flatness


class PreconditionedLangevin(Sampler):
    """Langevin dynamics with a step size for every weight, as an optimizer.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate, as in RMSprop.
        num_data: N.
        decay: β.
        floor: ϵ, which keeps scales finite where all gradients of a tensor are zero.
        adapt_steps: number of steps in which V is measured; None for all.
        **settings: the settings of every sampler: `temperature`, `weight_decay` and `masks`.
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
        if not floor > 0:
            raise ValueError(f"floor must be positive. Got {floor}.")
        own: dict[str, Any] = {"decay": decay, "floor": floor, "adapt_steps": adapt_steps, "steps": 0}
        super().__init__(params, lr, num_data=num_data, **own, **settings)

    def scaled(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> Tensors:
        """Return gradients times √G."""
        return torch._foreach_mul(grads, self.buffers(params, "root_scale"))

    def update(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> None:
        """Measure V, descend by G, and add noise scaled by √G."""
        grads = self.with_decay(group, params, grads)
        squares, roots = self.buffers(params, "square"), self.buffers(params, "root_scale")
        if group["adapt_steps"] is None or group["steps"] < group["adapt_steps"] or not group["steps"]:
            share = 1 - group["decay"] if group["steps"] else 1.0
            torch._foreach_mul_(squares, 1 - share)
            torch._foreach_addcmul_(squares, grads, grads, value=share)
            if not group["steps"]:  # full-batch gradients vanish at an optimum, and the first noise would be huge
                torch._foreach_add_(squares, 1 / group["num_data"])
            torch._foreach_copy_(roots, torch._foreach_sqrt(self.scales(squares, group["floor"])))
        group["steps"] += 1
        drift = torch._foreach_mul(grads, roots)
        torch._foreach_mul_(drift, -group["lr"])
        if group["temperature"]:
            std = math.sqrt(2 * group["lr"] * group["temperature"] / group["num_data"])
            torch._foreach_add_(drift, self.noise(params), alpha=std)
        torch._foreach_addcmul_(params, drift, roots)


@register("method")
@dataclass(frozen=True)
class PSGLD(ChainMethod):
    """Preconditioned SGLD; further settings as in `ChainMethod`.

    Attributes:
        decay: β of the running mean.
        floor: ϵ, which keeps scales finite where all gradients of a tensor are zero.
    """

    decay: float = 0.99
    floor: float = 1e-5

    name: ClassVar[str] = "psgld"
    usual_lr: ClassVar[float] = 3e-3

    @property
    def measures(self) -> bool:
        """Always True: V is measured during the burn-in."""
        return True

    def default_lr(self, bnn: Bayesian) -> float:
        """Return the usual rate of RMSprop, times σ for noise σ < 1."""
        return self.usual_lr * relative_flatness(bnn.likelihood)

    def sampler(self, params: Any, lr: float, burn_in_steps: int | None, **settings: Any) -> Sampler:
        """Make the preconditioned Langevin optimizer."""
        return PreconditionedLangevin(
            params, lr, decay=self.decay, floor=self.floor, adapt_steps=burn_in_steps, **settings
        )
