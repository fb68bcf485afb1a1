"""What samplers by stochastic gradients share: they are optimizers that add the right amount of noise.

The library's loss is the mean over examples, L(w) = mean NLL − log p(w) / N, so the potential whose Boltzmann
distribution is the posterior is U(w) = −log p(D, w) = N L(w), and its gradient N times that of the loss. Every sampler
here is written for L: `lr` is what it is for gradient descent on the loss, and N only sets how much noise there is. At
a temperature T the target is p(w|D)^(1/T); at zero a sampler is the plain optimizer it is made of.

A prior N(0, s²) may be left out of the loss, and be the sampler's `weight_decay` 1 / (s² N) instead: the same step, in
fewer passes over the weights (`weight_decay` in `prior.py`).

All tensors of a group are updated together (`torch._foreach_*`), and their noise is drawn at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bayeslim.samplers.noise import Noise

Tensors = list[Tensor] | tuple[Tensor, ...]


class Sampler(torch.optim.Optimizer):
    """The base of samplers by stochastic gradients.

    Args:
        params: parameters, or groups of them; a group of `temperature` 0 is optimised rather than sampled.
        lr: the learning rate of the optimizer underneath.
        num_data: N, the size of the training set.
        temperature: T of the target p(w|D)^(1/T).
        weight_decay: λ of λ w, added to the gradients; 0 where the loss has all of the prior in it.
        masks: which entries of a parameter move (True), by parameter; all of those without a mask.
        **settings: those of the algorithm.
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
        super().__init__(params, {**common, **settings})
        self.masks = dict(masks or {})
        self._moving = {p: int(mask.sum()) for p, mask in self.masks.items()}
        self._noises: dict[Any, Noise] = {}
        self._kept: dict[Any, Noise] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "masks": self.masks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._moving = {p: int(mask.sum()) for p, mask in self.masks.items()}
        self._noises, self._kept = {}, {}

    @abstractmethod
    def update(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> None:
        """Move the parameters of a group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the chain.

        Args:
            closure: computes the loss again and returns it; not needed where gradients are there.
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
                    f"{type(self).__name__} moves every weight at every step and takes no sparse gradients. "
                    "Use nn.Embedding(..., sparse=False)."
                )
            if params:
                self.update(group, params, self._masked(params, grads))
        return loss

    def noise(self, params: Tensors) -> tuple[Tensors, float]:
        """New noise for parameters, zero in entries that do not move, and its standard deviation.

        The next noise for them takes its place, unless `keep_noise` is called before.
        """
        key = _key(params)
        if key not in self._noises:
            self._noises[key] = Noise(params)
        noise = self._noises[key]
        unit = noise.draw()
        return self._masked(params, noise.parts), unit

    @staticmethod
    def counts_in_noise(params: Tensors) -> bool:
        """Whether steps may be counted in standard deviations of their noise: half precision ends too soon for that."""
        return all(p.dtype != torch.float16 for p in params)

    def keep_noise(self, params: Tensors) -> None:
        """Keep the last noise of parameters, until this is called for the next one."""
        key = _key(params)
        free = self._kept.pop(key, None)
        self._kept[key] = self._noises.pop(key)
        if free is not None:
            self._noises[key] = free

    def add_noise_(self, tensors: Tensors, params: Tensors, std: float) -> None:
        """Add noise of a standard deviation to tensors that belong to parameters, in all entries that move."""
        noise, unit = self.noise(params)
        torch._foreach_add_(tensors, noise, alpha=std / unit)

    def with_decay(self, group: dict[str, Any], params: Tensors, grads: Tensors) -> Tensors:
        """Gradients with those of the weight decay, λ w."""
        if not group["weight_decay"]:
            return grads
        return torch._foreach_add(grads, self._masked(params, params), alpha=group["weight_decay"])

    def add_decay_(self, group: dict[str, Any], tensors: Tensors, params: Tensors, factor: float) -> None:
        """Add the gradient of the weight decay, λ w, times a factor, to tensors that belong to parameters."""
        if group["weight_decay"]:
            torch._foreach_add_(tensors, self._masked(params, params), alpha=group["weight_decay"] * factor)

    def buffers(self, params: Tensors, name: str) -> Tensors:
        """A tensor beside every parameter, zeros at first; part of the state."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p)
        return [self.state[p][name] for p in params]

    def count(self, params: Tensors) -> int:
        """How many entries move."""
        return sum(self._moving.get(p, p.numel()) for p in params)

    def _masked(self, params: Tensors, values: Tensors) -> Tensors:
        """Values beside parameters, zero in entries that do not move."""
        if not self.masks:
            return values
        pairs = zip(params, values, strict=True)
        return [each * self.masks[p] if p in self.masks else each for p, each in pairs]


def _key(params: Tensors) -> Any:
    """Which parameters these are, and where."""
    return tuple((id(p), p.dtype, p.device) for p in params)
