"""Stochastic gradient Hamiltonian Monte Carlo: gradient descent with momentum, with noise.

    v ← (1 − α) v − lr ∇L(w) + √(2 α lr T / N) ε          w ← w + v

This is Chen et al.'s equation 15 at η = lr / N: SGD with momentum 1 − α, where α is the friction. In a direction of
curvature λ of L the variance of the chain is the posterior's times 1 / (1 − lr λ / (4 − 2α)), for any friction.

With `adapt_steps` the same is done in coordinates √P z = w, of a scale of their own for every weight: ∇L becomes √P ∇L,
and the move √P v. P = 1 / (√V + ϵ) comes from the second moment V of the gradients, averaged over a window that widens
where they are noisy (Springenberg et al.). It is measured over so many steps, the chain's burn-in, and then held, so
that the target is exact for what it is.

Minibatches bring noise of their own, of variance B. If it were independent from step to step it would heat the chain by
a share F = lr P B N / (2 α T) of its variance. The batches of an epoch are not: they share no example, and over the
epoch their noise cancels. What a direction remembers for longer than an epoch is hardly heated, and where examples are
as noisy as the model says, directions forget within an epoch only where F is about one; below, the heat falls with the
square of lr. So nothing is taken off the injected noise for it: that would make the chain too cold, by nearly F.

With `independent` batches, drawn with replacement, the variance lr² P² B of their noise takes the place of as much
injected noise. Then B = ½ (g_t − g_{t−1})² is measured as V is. (Springenberg et al. take V for B, which takes the
gradients of a full batch for noise, as would the variance around a mean over a chain that moves meanwhile.) It counts
what the chain's own step changes a gradient by too, about (lr P λ)² / (4α) of the injected noise, which is small where
lr is; and where F exceeds one, the chain is too hot without any injected noise.

Chen, Fox & Guestrin 2014, arXiv:1402.4102 · Springenberg et al. 2016
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from bayeslim.samplers.base import Sampler, Tensors


class StochasticHamiltonian(Sampler):
    """Stochastic gradient Hamiltonian Monte Carlo.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate, as of SGD with momentum; as of RMSprop where scales are adapted.
        num_data: N.
        friction: α, one minus the momentum; 1 is Langevin dynamics.
        adapt_steps: how many steps scales are measured for; 0 for none.
        independent: with `adapt_steps`, whether every batch is drawn anew from all the data, so that its noise can be
            measured and take the place of injected noise; not for the batches of an epoch, which cancel.
        floor: ϵ, the least root mean square of a gradient that counts.
        **settings: those of every sampler, `temperature`, `weight_decay` and `masks`.
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
        own: dict[str, Any] = {
            "friction": friction,
            "adapt_steps": adapt_steps,
            "independent": independent,
            "floor": floor,
        }
        super().__init__(params, lr, num_data=num_data, **own, steps=0, **settings)

    def update(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> None:
        """Slow down, accelerate, add noise, move."""
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
        """Draw the noise to inject, less the part that independent batches bring themselves."""
        noise = self.noise(params)
        if not group["adapt_steps"] or not group["independent"]:
            return noise
        share = torch._foreach_mul(self.buffers(params, "noise"), -(group["lr"] ** 2) / variance)
        torch._foreach_add_(share, 1.0)
        torch._foreach_clamp_min_(share, 0.0)
        torch._foreach_sqrt_(share)
        return torch._foreach_mul(noise, share)

    def _measure(self, group: dict[str, Any], params: Tensors, grads: Tensors, roots: Tensors) -> None:
        """√P, and P B of independent batches."""
        window, mean, square = (self.buffers(params, name) for name in ("window", "mean", "square"))
        share = torch._foreach_add(window, 1.0)
        torch._foreach_reciprocal_(share)
        torch._foreach_lerp_(mean, grads, share)
        torch._foreach_lerp_(square, torch._foreach_mul(grads, grads), share)
        scale = torch._foreach_sqrt(square)
        torch._foreach_add_(scale, group["floor"])
        torch._foreach_reciprocal_(scale)
        torch._foreach_copy_(roots, torch._foreach_sqrt(scale))
        if group["independent"]:
            self._measure_noise(params, grads, scale, share)
        means = torch._foreach_mul(mean, mean)
        signal = torch._foreach_div(means, torch._foreach_add(square, 1e-38))
        torch._foreach_addcmul_(window, window, signal, value=-1.0)
        torch._foreach_add_(window, 1.0)

    def _measure_noise(self, params: Tensors, grads: Tensors, scale: Tensors, share: Tensors) -> None:
        for p, grad in zip(params, grads, strict=True):
            self.state[p].setdefault("previous", grad.clone())  # the first gradient differs from none
        previous, changes = (self.buffers(params, name) for name in ("previous", "changes"))
        change = torch._foreach_sub(grads, previous)
        torch._foreach_copy_(previous, grads)
        torch._foreach_mul_(change, change)
        torch._foreach_mul_(change, 0.5)
        torch._foreach_lerp_(changes, change, share)
        torch._foreach_copy_(self.buffers(params, "noise"), torch._foreach_mul(changes, scale))
