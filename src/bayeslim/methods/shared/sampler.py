"""The base of stochastic gradient samplers: optimizers that add noise.

The library's loss is the mean over examples, L(w) = mean NLL − log p(w) / N. The potential whose Boltzmann distribution
is the posterior is U(w) = −log p(D, w) = N L(w), and its gradient is N times that of the loss. Every sampler is written
for L: `lr` means the same as in gradient descent on the loss, and N only sets the amount of noise. At a temperature T
the target is p(w|D)^(1/T); at zero a sampler is a plain optimizer.

A prior N(0, s²) may be left out of the loss and given as the sampler's `weight_decay` 1 / (s² N): the same step, in
fewer passes over the weights (`normal_prior.weight_decay`).

All tensors of a group are updated together (`torch._foreach_*`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bayeslim.noise import standard_normals

Tensors = list[Tensor] | tuple[Tensor, ...]

FLOOR_SHARE = 0.1
"""The smallest measured gradient of a weight, as a share of the average of its tensor.

Weights of a unit that is idle while scales are measured have next to no gradients. Without this floor they would take
huge steps once the unit is active.
"""


class Sampler(torch.optim.Optimizer):
    """The base of stochastic gradient samplers.

    Args:
        params: parameters, or groups of them; a group of `temperature` 0 is optimised rather than sampled.
        lr: the learning rate of the optimizer underneath.
        num_data: N, the size of the training set.
        temperature: T of the target p(w|D)^(1/T).
        weight_decay: λ of the term λ w added to the gradients; 0 if the loss contains the whole prior.
        masks: by parameter, which of its entries move (True); all entries of a parameter without a mask move.
        networks: how many networks are stacked in the first dimension of every parameter; None for one, unstacked.
        **settings: the settings of the algorithm.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        num_data: int,
        temperature: float = 1.0,
        weight_decay: float = 0.0,
        masks: Mapping[Tensor, Tensor] | None = None,
        networks: int | None = None,
        **settings: Any,
    ):
        if not lr > 0:
            raise ValueError(f"lr must be positive. Got {lr}.")
        if num_data < 1:
            raise ValueError(f"num_data is the number of training examples and must be positive. Got {num_data}.")
        if temperature < 0:
            raise ValueError(f"temperature must not be negative. Got {temperature}.")
        if weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative. Got {weight_decay}.")
        common = {"lr": lr, "num_data": num_data, "temperature": temperature, "weight_decay": weight_decay}
        noise = {"watches_noise": False, "noise_sum": 0.0, "noise_steps": 0, "kinetic_temperatures": ()}
        super().__init__(params, {**common, **noise, **settings})
        self.masks, self.networks = dict(masks or {}), networks
        self._moving = {p: int(mask.sum()) for p, mask in self.masks.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "masks": self.masks, "networks": self.networks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._moving = {p: int(mask.sum()) for p, mask in self.masks.items()}

    @abstractmethod
    def update(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> None:
        """Update the parameters of a group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the chain.

        Args:
            closure: recomputes the loss and returns it; not needed if the gradients are there.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            if any(grad.is_sparse for grad in grads):
                raise RuntimeError(
                    f"{type(self).__name__} moves every weight at every step: it needs dense gradients. "
                    "Use nn.Embedding(..., sparse=False)."
                )
            if params:
                masked = self._masked(params, grads)
                if group["watches_noise"]:
                    self._watch_noise(group, params, masked)
                self.update(group, params, masked)
        return loss

    def damping(self, group: dict[str, Any]) -> float:
        """Return the share of the velocity that is lost in a step: 1 without momentum."""
        return 1.0

    def present_friction(self, group: dict[str, Any]) -> float:
        """Return the friction of the step just made."""
        return self.damping(group)

    def kinetic_temperature(self, group: dict[str, Any]) -> float | None:
        """Compute T_kin = (1 − α/2) N |v|² / (n lr); None without momentum.

        With friction α and n weights it is the temperature of the target if the steps are small and gradients exact.
        Where U is quadratic, it has the same mean as the configurational temperature, whatever the step.
        """
        params = [p for p in group["params"] if "velocity" in self.state[p]]
        if not params:
            return None
        energy = sum(float(norm) ** 2 for norm in torch._foreach_norm(self.buffers(params, "velocity")))
        factor = (1 - self.present_friction(group) / 2) * group["num_data"] / group["lr"]
        return float(factor * energy / max(1, self.count(params)))

    def scaled(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> Tensors:
        """Return gradients in coordinates with one step size for all weights."""
        return grads

    def excess(self, group: dict[str, Any], lr: float, temperature: float) -> float | None:
        """Estimate the relative excess of variance by gradient noise.

        It is None if the noise was not watched.

        Independent minibatches add lr² B to the variance 2 α lr T / N that a step injects, where B is the variance of
        their gradients and α the damping. This is the ratio of the two, averaged over the weights.
        """
        if not group["noise_steps"]:
            return None
        noise = group["noise_sum"] / group["noise_steps"]
        return float(lr * noise * group["num_data"] / (2 * self.damping(group) * temperature))

    def _watch_noise(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> None:
        """Add ½ (g_t − g_{t−1})², whose mean over batches is B, averaged over the weights."""
        scaled = self.scaled(group, params, grads)
        if all("last_gradient" in self.state[p] for p in params):
            norms = torch._foreach_norm(torch._foreach_sub(scaled, [self.state[p]["last_gradient"] for p in params]))
            group["noise_sum"] += 0.5 * sum(float(norm) ** 2 for norm in norms) / self.count(params)
            group["noise_steps"] += 1
        for p, grad in zip(params, scaled, strict=True):
            self.state[p]["last_gradient"] = grad.detach().clone()

    def watch_noise(self, group: dict[str, Any], on: bool) -> None:
        """Start the measurement of gradient noise in a group, or end it."""
        group["watches_noise"] = on
        for p in () if on else group["params"]:
            self.state[p].pop("last_gradient", None)

    def noise(self, params: Tensors) -> Tensors:
        """Draw ε ~ N(0, 1) like the parameters, with zeros in entries that do not move."""
        return self._masked(params, standard_normals(params))

    def with_decay(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> Tensors:
        """Add the gradients of the weight decay, λ w, to gradients."""
        if not group["weight_decay"]:
            return grads
        return torch._foreach_add(grads, self._masked(params, params), alpha=group["weight_decay"])

    def buffers(self, params: Tensors, name: str) -> Tensors:
        """Return the state tensor of this name of every parameter, zeros at first."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p)
        return [self.state[p][name] for p in params]

    def scales(self, squares: Tensors, floor: float) -> Tensors:
        """Compute the scales of weights, 1 / (√V + a + ϵ).

        a is `FLOOR_SHARE` of the average √V of a tensor.

        Args:
            squares: V, squared gradients of every parameter.
            floor: ϵ.
        """
        roots = torch._foreach_sqrt(squares)
        first = 0 if self.networks is None else 1
        dims = [tuple(range(first, root.ndim)) for root in roots]
        averages = [root.mean(own, keepdim=True) if own else root for root, own in zip(roots, dims, strict=True)]
        torch._foreach_add_(roots, averages, alpha=FLOOR_SHARE)
        torch._foreach_add_(roots, floor)
        return torch._foreach_reciprocal(roots)

    def count(self, params: Tensors) -> int:
        """Count the entries that move."""
        return sum(self._moving.get(p, p.numel()) for p in params)

    def _masked(self, params: Tensors, values: Tensors) -> Tensors:
        """Set values to zero in entries that do not move."""
        if not self.masks:
            return values
        pairs = zip(params, values, strict=True)
        return [each * self.masks[p] if p in self.masks else each for p, each in pairs]
