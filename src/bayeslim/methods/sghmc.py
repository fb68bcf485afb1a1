"""Stochastic gradient Hamiltonian Monte Carlo: momentum with noise, whose iterates are draws from the posterior.

    v ← (1 − α) v − lr ∇L(w) + √(2 α lr T / N) ε          w ← w + v

This is equation 15 of Chen et al. at η = lr / N: SGD with momentum 1 − α, where α is the friction. In a direction of
curvature λ of L, the variance of the chain is the posterior's times 1 / (1 − lr λ / (4 − 2α)), for any friction.

With `adapt` the same is done in coordinates z with w = √P z, which give every weight its own scale: ∇L becomes √P ∇L,
and the move √P v. P = 1 / (√V + a + ϵ) comes from the second moment V of the gradients, averaged over a window that
widens where they are noisy (Springenberg et al.). The paper has no a, which is a tenth of the average √V of a tensor:
weights without gradients in the burn-in, such as those of an idle unit, would take huge steps later. P is measured
during the burn-in and then fixed, so that the target is exact for any P.

Minibatches add gradient noise of variance B. If it were independent from step to step, it would heat the chain by a
share F = lr P B N / (2 α T) of its variance. The batches of a shuffled epoch are not independent: they share no
example, and over the epoch their noise cancels. A direction that remembers longer than an epoch is hardly heated. Where
examples are as noisy as the model says, directions forget within an epoch only if F is about one; for smaller steps the
excess falls with the square of lr. So the injected noise is not reduced: that would make the chain too cold by nearly
F.

With `independent` batches, drawn with replacement, the variance lr² P² B of their noise replaces as much injected
noise. B = ½ (g_t − g_{t−1})² is then measured as V is. (Springenberg et al. use V for B, which counts full-batch
gradients as noise.) It also counts the change of the gradient by the chain's own step, about (lr P λ)² / (4α) of the
injected noise, which is small where lr is. Where F exceeds one, the chain is too hot even without injected noise.

Chen, Fox & Guestrin 2014, arXiv:1402.4102 · Springenberg et al. 2016
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bayeslim.bayesian import Bayesian
from bayeslim.io.registry import register
from bayeslim.methods.shared.chain_method import ChainMethod
from bayeslim.methods.shared.sampler import Sampler, Tensors
from bayeslim.methods.shared.steepness import relative_flatness


class StochasticHamiltonian(Sampler):
    """Stochastic gradient Hamiltonian Monte Carlo, as an optimizer.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate, as in SGD with momentum; as in RMSprop where scales are adapted.
        num_data: N.
        friction: α, one minus the momentum; 1 gives Langevin dynamics.
        adapt_steps: number of steps in which scales are measured; 0 for none.
        independent: with `adapt_steps`, whether every batch is drawn from all the data with replacement, so that its
            noise can be measured and replace injected noise. Leave it off for the batches of a shuffled epoch, whose
            noise cancels.
        floor: ϵ, which keeps scales finite where all gradients of a tensor are zero.
        **settings: the settings of every sampler: `temperature`, `weight_decay` and `masks`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        num_data: int,
        friction: float = 0.1,
        adapt_steps: int = 0,
        independent: bool = False,
        floor: float = 1e-5,
        **settings: Any,
    ):
        if not 0 < friction <= 1:
            raise ValueError(f"friction must be in (0, 1]. Got {friction}.")
        settings |= {"friction": friction, "adapt_steps": adapt_steps, "independent": independent, "floor": floor}
        super().__init__(params, lr, num_data=num_data, steps=0, **settings)

    def damping(self, group: dict[str, Any]) -> float:
        """Return the friction."""
        return float(group["friction"])

    def scaled(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> Tensors:
        """Return gradients times √P."""
        return torch._foreach_mul(grads, self.buffers(params, "root_scale")) if group["adapt_steps"] else grads

    def update(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> None:
        """Update velocity and weights."""
        grads, velocity, roots = self.with_decay(group, params, grads), self.buffers(params, "velocity"), None
        if group["adapt_steps"]:
            roots = self.buffers(params, "root_scale")
            if group["steps"] < group["adapt_steps"]:
                self._measure(group, params, grads, roots)
            group["steps"] += 1
            grads = torch._foreach_mul(grads, roots)
        torch._foreach_mul_(velocity, 1 - group["friction"])
        torch._foreach_add_(velocity, grads, alpha=-group["lr"])
        variance = 2 * group["friction"] * group["lr"] * group["temperature"] / group["num_data"]
        if variance:
            torch._foreach_add_(velocity, self._injected(group, params, variance), alpha=math.sqrt(variance))
        if roots is None:
            torch._foreach_add_(params, velocity)
        else:
            torch._foreach_addcmul_(params, velocity, roots)

    def _injected(self, group: dict[str, Any], params: Tensors, variance: float) -> Tensors:
        """Draw the noise to inject, less the part that independent batches have."""
        noise = self.noise(params)
        if not group["adapt_steps"] or not group["independent"]:
            return noise
        share = torch._foreach_mul(self.buffers(params, "noise"), -(group["lr"] ** 2) / variance)
        torch._foreach_add_(share, 1.0)
        torch._foreach_clamp_min_(share, 0.0)
        torch._foreach_sqrt_(share)
        return torch._foreach_mul(noise, share)

    def _measure(self, group: dict[str, Any], params: Tensors, grads: Tensors, roots: Tensors) -> None:
        """Measure √P, and P B of independent batches."""
        window, mean, square = (self.buffers(params, name) for name in ("window", "mean", "square"))
        share = torch._foreach_add(window, 1.0)
        torch._foreach_reciprocal_(share)
        torch._foreach_lerp_(mean, grads, share)
        torch._foreach_lerp_(square, torch._foreach_mul(grads, grads), share)
        scale = self.scales(square, group["floor"])
        torch._foreach_copy_(roots, torch._foreach_sqrt(scale))
        if group["independent"]:
            self._measure_noise(params, grads, scale, share)
        means = torch._foreach_mul(mean, mean)
        signal = torch._foreach_div(means, torch._foreach_add(square, 1e-38))
        torch._foreach_addcmul_(window, window, signal, value=-1.0)
        torch._foreach_add_(window, 1.0)

    def _measure_noise(self, params: Tensors, grads: Tensors, scale: Tensors, share: Tensors) -> None:
        for p, grad in zip(params, grads, strict=True):
            self.state[p].setdefault("previous", grad.clone())  # the first change is zero
        previous, changes = (self.buffers(params, name) for name in ("previous", "changes"))
        change = torch._foreach_sub(grads, previous)
        torch._foreach_copy_(previous, grads)
        torch._foreach_mul_(change, change)
        torch._foreach_mul_(change, 0.5)
        torch._foreach_lerp_(changes, change, share)
        torch._foreach_copy_(self.buffers(params, "noise"), torch._foreach_mul(changes, scale))


@register("method")
@dataclass(frozen=True)
class SGHMC(ChainMethod):
    """Stochastic gradient HMC; further settings as in `ChainMethod`.

    Attributes:
        friction: α, one minus the momentum.
        adapt: whether a scale for every weight is measured during the burn-in; then `lr` is as in RMSprop. Minibatches
            of shuffled data make the draws wider than the posterior, by an amount that falls with the square of `lr`.
    """

    friction: float = 0.1
    adapt: bool = False

    name: ClassVar[str] = "sghmc"
    usual_lr: ClassVar[float] = 0.03

    @property
    def measures(self) -> bool:
        """Whether scales are measured during the burn-in: with `adapt`."""
        return self.adapt

    def default_lr(self, bnn: Bayesian) -> float:
        """Return the usual rate of SGD with momentum, or with `adapt` that of RMSprop.

        The latter is times σ for noise σ < 1.
        """
        return 1e-3 * relative_flatness(bnn.likelihood) if self.adapt else super().default_lr(bnn)

    def sampler(self, params: Any, lr: float, burn_in_steps: int | None, **settings: Any) -> Sampler:
        """Make the optimizer with momentum, friction and noise."""
        steps = sys.maxsize if burn_in_steps is None else max(1, burn_in_steps)
        return StochasticHamiltonian(
            params, lr, friction=self.friction, adapt_steps=steps if self.adapt else 0, **settings
        )
