"""Stochastic gradient Nosé-Hoover thermostat: momentum whose friction keeps the temperature.

    v ← (1 − α) v − lr ∇L(w) + √(2 a lr T / N) ε          w ← w + v
    α ← α + c ((1 − α/2) |v|² / (n lr T / N) − 1)

over the n weights that are sampled. Gradient noise of minibatches heats the chain by an unknown amount. The friction α
grows until the kinetic energy has its correct value, so no estimate of that noise is needed. (It is assumed to have the
same variance for all weights and to be independent of them.) Around its mean, α fluctuates with a standard deviation
√(c / n).

In the paper c = lr / N, in the units of its step. For a network that is so small that α hardly moves. Its factor
1 − α/2 is one, which is correct as the step goes to zero. At a finite step, v² has the mean lr T / (N (1 − α/2)) where
w has the correct variance.

Ding et al. 2014
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayeslim.io.registry import register
from bayeslim.methods.shared.chain_method import ChainMethod
from bayeslim.methods.shared.sampler import Sampler, Tensors


class Thermostat(Sampler):
    """Stochastic gradient Nosé-Hoover thermostat, as an optimizer.

    Args:
        params: parameters, or groups of them, each with its own thermostat.
        lr: the learning rate, as in SGD with momentum.
        num_data: N.
        friction: a, the initial α, which also sets the injected noise.
        coupling: c, the rate at which α adapts; it takes about 1/c steps.
        **settings: the settings of every sampler: `temperature`, `weight_decay` and `masks`.
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
        """Return the current friction α of a group: one number for each network."""
        first = self.state[group["params"][0]]
        if "friction" not in first:
            like = group["params"][0]
            shape = () if self.networks is None else (self.networks,)
            first["friction"] = like.new_full(shape, group["friction"])
        friction: Tensor = first["friction"]
        return friction

    def damping(self, group: dict[str, Any]) -> float:
        """Return the friction without gradient noise."""
        return float(group["friction"])

    def present_friction(self, group: dict[str, Any]) -> float:
        """Return the friction α that the thermostat has now, on average over networks."""
        return float(self.friction_of(group).mean())

    def update(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> None:
        """Update velocity, weights and friction."""
        grads, velocity = self.with_decay(group, params, grads), self.buffers(params, "velocity")
        friction = self.friction_of(group)
        keep = 1 - friction
        if self.networks is None:
            torch._foreach_mul_(velocity, keep)
        else:
            torch._foreach_mul_(velocity, [keep.view(-1, *[1] * (v.ndim - 1)) for v in velocity])
        torch._foreach_add_(velocity, grads, alpha=-group["lr"])
        heat = group["lr"] * group["temperature"] / group["num_data"]
        if heat:
            torch._foreach_add_(velocity, self.noise(params), alpha=math.sqrt(2 * group["friction"] * heat))
            weights = self.count(params) / (self.networks or 1)
            excess = (1 - friction / 2) * self._energy(velocity, friction) / (weights * heat) - 1
            # Beyond one, the velocity would reverse at every step.
            friction.add_(excess, alpha=group["coupling"]).clamp_(-1, 1)
        torch._foreach_add_(params, velocity)

    def _energy(self, velocity: Tensors, like: Tensor) -> Tensor:
        """Sum the squares of velocities; over each network where several are stacked."""
        if self.networks is None:
            return torch.stack([norm.to(like) for norm in torch._foreach_norm(velocity)]).square().sum()
        return torch.stack([v.reshape(len(v), -1).square().sum(1).to(like) for v in velocity]).sum(0)


@register("method")
@dataclass(frozen=True)
class SGNHT(ChainMethod):
    """Stochastic gradient thermostat; further settings as in `ChainMethod`.

    Attributes:
        friction: a, the initial friction, which also sets the injected noise.
        coupling: c, the rate at which the friction adapts.
    """

    friction: float = 0.1
    coupling: float = 0.01

    name: ClassVar[str] = "sgnht"
    usual_lr: ClassVar[float] = 0.03

    def sampler(self, params: Any, lr: float, burn_in_steps: int | None, **settings: Any) -> Sampler:
        """Make the thermostat."""
        return Thermostat(params, lr, friction=self.friction, coupling=self.coupling, **settings)
