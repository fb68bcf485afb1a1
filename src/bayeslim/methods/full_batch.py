"""The exact potential of a network, U(w) = −log p(D|w) − log p(w), and its gradient, from all the data at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayeslim.methods.moving import Moving
from bayeslim.types import Params, call, device_of, split_batch, to_device

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


class FullBatch:
    """U of the weights that move, as a vector; the network is in evaluation mode, so that U is a function of them.

    Args:
        bnn: the network; evaluating U writes to its weights.
        moving: the weights.
        loader: the data.
        temperature: T of p(w|D)^(1/T): U is divided by it.
    """

    def __init__(self, bnn: Bayesian, moving: Moving, loader: Any, temperature: float = 1.0):
        self.bnn, self.moving, self.temperature = bnn, moving, temperature
        device = device_of(bnn.model)
        self.batches = [to_device(split_batch(batch), device) for batch in loader]
        self.parameters = moving.parameters(bnn)
        whole = (torch.ones_like(p, dtype=torch.bool) for p in self.parameters)
        masks = [moving.masks.get(name, mask) for name, mask in zip(moving.names, whole, strict=True)]
        self.kept = [mask.to(device).flatten() for mask in masks]
        self.sizes = [int(kept.sum()) for kept in self.kept]

    def vector(self) -> Tensor:
        """The weights as they are now, (D,)."""
        return self.flat({n: p.detach() for n, p in zip(self.moving.names, self.parameters, strict=True)})

    def flat(self, params: Mapping[str, Tensor]) -> Tensor:
        """The weights that move of parameters by name, (D,)."""
        parts = zip(self.moving.names, self.kept, strict=True)
        return torch.cat([params[name].flatten()[kept] for name, kept in parts])

    def put(self, vector: Tensor) -> None:
        """Write weights into the network."""
        with torch.no_grad():
            for p, kept, part in zip(self.parameters, self.kept, vector.split(self.sizes), strict=True):
                p.copy_(p.flatten().masked_scatter(kept, part.to(p)).view_as(p))

    def params(self, vector: Tensor) -> Params:
        """The parameters by name with these weights."""
        self.put(vector)
        return {n: p.detach().clone() for n, p in zip(self.moving.names, self.parameters, strict=True)}

    def __call__(self, vector: Tensor) -> tuple[float, Tensor]:
        """U and its gradient at a vector of weights."""
        self.put(vector)
        likelihood = self.bnn.likelihood
        with torch.enable_grad():
            energy, totals = 0.0, [torch.zeros_like(p) for p in self.parameters]
            for term in (*self._data_terms(likelihood), lambda: -self.bnn.log_prior()):
                value = term()
                energy += float(value.detach().double())
                found = torch.autograd.grad(value, self.parameters, allow_unused=True)
                for total, part in zip(totals, found, strict=True):
                    if part is not None:
                        total.add_(part)
        gradient = torch.cat([t.flatten()[kept] for t, kept in zip(totals, self.kept, strict=True)])
        return energy / self.temperature, gradient.to(vector) / self.temperature

    def _data_terms(self, likelihood: Any) -> list[Any]:
        return [
            lambda inputs=inputs, targets=targets: -likelihood.log_prob(call(self.bnn.model, inputs), targets).sum()
            for inputs, targets in self.batches
        ]
