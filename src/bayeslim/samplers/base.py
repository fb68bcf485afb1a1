"""What samplers by stochastic gradients share: they are optimizers that add the right amount of noise.

The library's loss is the mean over examples, L(w) = mean NLL − log p(w) / N, so the potential whose Boltzmann
distribution is the posterior is U(w) = −log p(D, w) = N L(w), and its gradient N times that of the loss. Every sampler
here is written for L: `lr` is what it is for gradient descent on the loss, and N only sets how much noise there is. At
a temperature T the target is p(w|D)^(1/T); at zero a sampler is the plain optimizer it is made of.

All tensors of a group are updated together (`torch._foreach_*`), and their noise is drawn at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bayeslim.samplers.noise import noise_like

Tensors = list[Tensor] | tuple[Tensor, ...]


class Sampler(torch.optim.Optimizer):
    """The base of samplers by stochastic gradients.

    Args:
        params: parameters, or groups of them; a group of `temperature` 0 is optimised rather than sampled.
        lr: the learning rate of the optimizer underneath.
        num_data: N, the size of the training set.
        temperature: T of the target p(w|D)^(1/T).
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
        masks: Mapping[Tensor, Tensor] | None = None,
        **settings: Any,
    ):
        if not lr > 0:
            raise ValueError(f"lr must be positive. Got {lr}.")
        if num_data < 1:
            raise ValueError(f"num_data is the number of training examples and must be positive. Got {num_data}.")
        if temperature < 0:
            raise ValueError(f"temperature must not be negative. Got {temperature}.")
        super().__init__(params, {"lr": lr, "num_data": num_data, "temperature": temperature, **settings})
        self.masks = dict(masks or {})
        self._moving = {p: int(mask.sum()) for p, mask in self.masks.items()}
        self._spare: dict[Tensor, Tensor] = {}

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
            if any(p.grad.is_sparse for p in params):
                raise RuntimeError(
                    f"{type(self).__name__} moves every weight at every step and takes no sparse gradients. "
                    "Use nn.Embedding(..., sparse=False)."
                )
            if params:
                self.update(group, params, [self._masked(p, p.grad) for p in params])
        return loss

    def noise(self, params: Tensors) -> tuple[list[Tensor], float]:
        """New noise for parameters, zero in entries that do not move, and its standard deviation."""
        out = None
        if params[0].device.type == "cpu":
            spare = [self._spare.pop(p, None) for p in params]
            out = [torch.empty_like(p) if own is None else own for p, own in zip(params, spare, strict=True)]
        noise, unit = noise_like(params, out)
        return [self._masked(p, each) for p, each in zip(params, noise, strict=True)], unit

    def add_noise_(self, tensors: Tensors, params: Tensors, std: float, scales: Tensors | None = None) -> None:
        """Add noise to tensors that belong to parameters, in all entries that move.

        Args:
            tensors: what to add to.
            params: the parameters they belong to.
            std: the standard deviation of the noise.
            scales: factors on it, entry by entry.
        """
        noise, unit = self.noise(params)
        if scales is None:
            torch._foreach_add_(tensors, noise, alpha=std / unit)
        else:
            torch._foreach_addcmul_(tensors, noise, scales, value=std / unit)
        self.keep_memory(params, noise)

    def keep_memory(self, params: Tensors, tensors: Tensors) -> None:
        """Let the next noise of parameters take the place of tensors that are no longer needed."""
        if params[0].device.type == "cpu":
            self._spare.update(zip(params, tensors, strict=True))

    def buffers(self, params: Tensors, name: str) -> Tensors:
        """A tensor beside every parameter, zeros at first; part of the state."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p)
        return [self.state[p][name] for p in params]

    def count(self, params: Tensors) -> int:
        """How many entries move."""
        return sum(self._moving.get(p, p.numel()) for p in params)

    def _masked(self, param: Tensor, values: Tensor) -> Tensor:
        return values * self.masks[param] if param in self.masks else values
