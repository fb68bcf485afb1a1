"""Stochastic gradient Hamiltonian Monte Carlo: gradient descent with momentum, with noise.

    v ← (1 − α) v − lr P ∇L(w) + √(2 α lr T P / N − lr² P² B) ε          w ← w + v

With P = 1 and without B this is Chen et al.'s equation 15 at η = lr / N: SGD with momentum 1 − α, where α is the
friction. In a direction of curvature λ of L the variance of the chain is the posterior's times
1 / (1 − lr λ / (4 − 2α)), for any friction; minibatches add lr / (2α) times the variance of their gradients, over λ.

The velocity is kept in units of the noise of its last step, as what was drawn then plus what was there before: that is
one pass over memory less than to slow it down, and then to add to it.

With `adapt_steps` P and B are measured over so many steps, the chain's burn-in, and then held, so that the target is
exact for what they are: P = 1 / (√V + ϵ) from the second moment V of the gradients, averaged over a window that widens
where they are noisy (Springenberg et al.), and B = ½ (g_t − g_{t−1})², averaged over the same window: the variance of
the noise of gradients, which then takes the place of injected noise. Theirs takes V for B, which also takes the
gradients of a full batch for noise, as would the variance around a mean over a chain that moves meanwhile.

B is an approximation. It still counts what the chain's own step changes a gradient by, which takes about a share
(lr P λ)² / (4α) of the injected noise even on full batches: it is small only where lr is. It takes the noise of
successive gradients for independent. That of the batches of an epoch is not: they share no example, and over an epoch
their noise cancels, so that more is left out than they bring, and the chain is too cold, the more so the smaller the
batches and the larger lr. Where lr² P² B exceeds the injected noise, none is injected. Small batches need a small lr,
or `adapt_steps` 0.

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
        adapt_steps: how many steps scales and the noise of gradients are measured for; 0 for neither.
        floor: ϵ, the least root mean square of a gradient that counts.
        **settings: those of every sampler, `temperature` and `masks`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        num_data: int,
        friction: float = 0.1,
        adapt_steps: int = 0,
        floor: float = 1e-5,
        **settings: Any,
    ):
        if not 0 < friction <= 1:
            raise ValueError(f"friction must be in (0, 1]. Got {friction}.")
        own: dict[str, Any] = {"friction": friction, "adapt_steps": adapt_steps, "floor": floor}
        own |= {"steps": 0, "unit": 1.0}
        super().__init__(params, lr, num_data=num_data, **own, **settings)

    def update(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> None:
        """Slow down, accelerate, add noise, move."""
        # of each step the variance 2 α lr T / N is the temperature's
        heat = 2 * group["friction"] * group["lr"] * group["temperature"] / group["num_data"]
        if group["adapt_steps"]:
            self._adapted(group, params, grads, heat)
            return
        velocity = self.buffers(params, "velocity")
        if heat:
            velocity = self._reborn(group, params, velocity, heat)
        else:
            torch._foreach_mul_(velocity, 1 - group["friction"])
        torch._foreach_add_(velocity, grads, alpha=-group["lr"] / group["unit"])
        torch._foreach_add_(params, velocity, alpha=group["unit"])

    def _reborn(self, group: dict[str, Any], params: Tensors, velocity: Tensors, heat: float) -> Tensors:
        """Noise, with what is left of the velocity added to it, in units of that noise."""
        noise, deviation = self.noise(params)
        unit = math.sqrt(heat) / deviation
        change, group["unit"] = group["unit"] / unit, unit
        torch._foreach_add_(noise, velocity, alpha=(1 - group["friction"]) * change)
        for p, its_own in zip(params, noise, strict=True):
            self.state[p]["velocity"] = its_own
        for p in group["params"]:
            if p.grad is None and "velocity" in self.state[p]:
                self.state[p]["velocity"].mul_(change)  # as fast as before, in the new units
        return noise

    def _adapted(self, group: dict[str, Any], params: Tensors, grads: Tensors, heat: float) -> None:
        velocity = self.buffers(params, "velocity")
        torch._foreach_mul_(velocity, 1 - group["friction"])
        scale, spread = self.buffers(params, "scale"), self.buffers(params, "spread")
        if group["steps"] < group["adapt_steps"]:
            self._measure(params, grads, scale, spread, group["floor"])
        group["steps"] += 1
        torch._foreach_addcmul_(velocity, grads, scale, value=-group["lr"])
        if heat:
            variance = torch._foreach_mul(scale, heat)
            torch._foreach_addcmul_(variance, spread, spread, value=-(group["lr"] ** 2))
            torch._foreach_clamp_min_(variance, 0.0)
            torch._foreach_sqrt_(variance)
            self.add_noise_(velocity, params, 1.0, variance)
        torch._foreach_add_(params, velocity)

    def _measure(self, params: Tensors, grads: Tensors, scale: Tensors, spread: Tensors, floor: float) -> None:
        """P, and the standard deviation P √B of a scaled gradient."""
        window, mean, square, noise = (self.buffers(params, name) for name in ("window", "mean", "square", "noise"))
        for p, grad in zip(params, grads, strict=True):
            self.state[p].setdefault("previous", grad.clone())  # the first gradient differs from none
        previous = self.buffers(params, "previous")
        share = torch._foreach_add(window, 1.0)
        torch._foreach_reciprocal_(share)
        torch._foreach_lerp_(mean, grads, share)
        squares = torch._foreach_mul(grads, grads)
        torch._foreach_lerp_(square, squares, share)
        changes = torch._foreach_sub(grads, previous)
        torch._foreach_copy_(previous, grads)
        torch._foreach_mul_(changes, changes)
        torch._foreach_mul_(changes, 0.5)
        torch._foreach_lerp_(noise, changes, share)
        means = torch._foreach_mul(mean, mean)
        signal = torch._foreach_div(means, torch._foreach_add(square, 1e-38))
        torch._foreach_addcmul_(window, window, signal, value=-1.0)
        torch._foreach_add_(window, 1.0)
        roots = torch._foreach_sqrt(square)
        torch._foreach_add_(roots, floor)
        torch._foreach_copy_(scale, torch._foreach_reciprocal(roots))
        torch._foreach_copy_(spread, torch._foreach_mul(torch._foreach_sqrt(noise), scale))
