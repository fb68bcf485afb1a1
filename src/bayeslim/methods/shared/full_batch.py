"""The exact potential of a network, U(w) = −log p(D|w) − log p(w), and its gradient, from all the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.methods.shared.moving import Moving
from bayeslim.train.loaders import check_labelled
from bayeslim.types import Inputs, call, device_of, note_inputs, split_batch, to_device


class FullBatch:
    """U / T as a function of the weights that move, flattened, for p(w|D)^(1/T).

    The network must be in evaluation mode. Evaluating U overwrites its weights.
    """

    def __init__(self, bnn: Bayesian, moving: Moving, loader: Any, temperature: float = 1.0):
        self.bnn, self.moving, self.temperature = bnn, moving, temperature
        device = device_of(bnn.model)
        self.batches = [to_device(split_batch(batch), device) for batch in loader]
        check_labelled(bnn.likelihood, (targets for _, targets in self.batches))
        self.parameters = moving.parameters(bnn)
        masks = [moving.masks.get(name) for name in moving.names]
        self.kept = [None if mask is None else mask.to(device).flatten() for mask in masks]
        pairs = zip(self.parameters, self.kept, strict=True)
        self.sizes = [p.numel() if kept is None else int(kept.sum()) for p, kept in pairs]

    def vector(self) -> Tensor:
        """Return the current weights, (D,)."""
        return self._joined([p.detach() for p in self.parameters])

    def put(self, vector: Tensor) -> None:
        """Write weights into the network."""
        with torch.no_grad():
            for p, kept, part in zip(self.parameters, self.kept, vector.split(self.sizes), strict=True):
                p.copy_((part if kept is None else p.flatten().masked_scatter(kept, part.to(p))).view_as(p))

    def __call__(self, vector: Tensor) -> tuple[float, Tensor]:
        """Compute U and its gradient at a vector of weights."""
        self.put(vector)
        energy, total = 0.0, torch.zeros_like(vector)
        for index, (inputs, targets) in enumerate(self.batches):
            with torch.enable_grad():
                value = -self.bnn.likelihood.log_prob(self._outputs(inputs), targets).sum()
                value = value - self.bnn.log_prior() if index == 0 else value
                gradients = torch.autograd.grad(value, self.parameters, materialize_grads=True)
            energy += float(value.detach().double())
            total += self._joined(gradients)
        return energy / self.temperature, total / self.temperature

    def _outputs(self, inputs: Inputs) -> Tensor:
        try:
            return call(self.bnn.model, inputs)
        except (RuntimeError, ValueError) as error:
            note_inputs(error, self.bnn.model, inputs)
            raise

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        pairs = zip(tensors, self.kept, strict=True)
        return torch.cat([t.flatten() if kept is None else t.flatten()[kept] for t, kept in pairs])
