"""Stochastic gradient Nosé-Hoover thermostat: momentum whose friction keeps the temperature.

    v ← (1 − α) v − lr ∇L(w) + √(2 a lr T / N) ε          w ← w + v
    α ← α + c ((1 − α/2) |v|² / (n lr T / N) − 1)

over the n weights that are sampled. The noise of minibatches heats the chain by an amount nobody knows; the friction α
grows until the kinetic energy is what it should be, so that no estimate of that noise is needed (it is taken to be the
same for all weights, and independent of them). Around its mean, α fluctuates with a standard deviation √(c / n).

The paper's equations have c = lr / N, in the units of its step, which for a network is so little that α hardly moves.
Its factor 1 − α/2 is one: right as the step goes to zero, while at a finite one v² has the mean lr T / (N (1 − α/2))
where w has the right variance.

Ding et al. 2014
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bayeslim.samplers.base import Sampler, Tensors


class Thermostat(Sampler):
    """Stochastic gradient Nosé-Hoover thermostat.

    Args:
        params: parameters, or groups of them, each with a thermostat of its own.
        lr: the learning rate, as of SGD with momentum.
        num_data: N.
        friction: a, where α starts, and the injected noise.
        coupling: c, how fast α follows; it takes about 1/c steps.
        **settings: those of every sampler, `temperature`, `weight_decay` and `masks`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        num_data: int,
        friction: float = 0.1,
        coupling: float = 0.01,
        **settings: Any,
    ):
        if not 0 < friction <= 1:
            raise ValueError(f"friction must be in (0, 1]. Got {friction}.")
        if not 0 < coupling < 1:
            raise ValueError(f"coupling must be in (0, 1). Got {coupling}.")
        super().__init__(params, lr, num_data=num_data, friction=friction, coupling=coupling, **settings)

    def friction_of(self, group: dict[str, Any]) -> Tensor:
        """The friction α of a group as it is now, a scalar."""
        first = self.state[group["params"][0]]
        if "friction" not in first:
            like = group["params"][0]
            first["friction"] = torch.tensor(group["friction"], dtype=like.dtype, device=like.device)
        friction: Tensor = first["friction"]
        return friction

    def update(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> None:
        """Slow down, accelerate, add noise, move, and adjust the friction."""
        grads, velocity = self.with_decay(group, params, grads), self.buffers(params, "velocity")
        friction = self.friction_of(group)
        torch._foreach_mul_(velocity, 1 - friction)
        torch._foreach_add_(velocity, grads, alpha=-group["lr"])
        heat = group["lr"] * group["temperature"] / group["num_data"]
        if heat:
            torch._foreach_add_(velocity, self.noise(params), alpha=math.sqrt(2 * group["friction"] * heat))
            energy = torch.stack([norm.to(friction) for norm in torch._foreach_norm(velocity)]).square().sum()
            excess = (1 - friction / 2) * energy / (self.count(params) * heat) - 1
            # beyond one the velocity would turn round at every step
            friction.add_(excess, alpha=group["coupling"]).clamp_(-1, 1)
        torch._foreach_add_(params, velocity)
