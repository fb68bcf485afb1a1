"""The exact potential of networks, U(w) = −log p(D|w) − log p(w), and its gradient, from all the data.

The weights that move are one vector, (D,), as a sampler sees them; those of a stack of networks are (S, D).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError
from bayeslim.methods.shared.abreast import AbreastLoader, Stack
from bayeslim.methods.shared.moving import Moving
from bayeslim.noise import kept_random_state
from bayeslim.posteriors.particles import tensors_of
from bayeslim.train.loaders import Loader, check_labelled
from bayeslim.types import Batch, Params, call, device_of, flattened, note_inputs, split_batch, to_device


def check_leaves_none_out(loader: Any) -> None:
    """Raise if a loader leaves out a last, smaller batch."""
    batches = getattr(loader, "batch_sampler", loader)
    if not isinstance(batches, BatchSampler | Loader) or not batches.drop_last:
        return
    size = batches.share if isinstance(batches, Loader) else len(batches.sampler)  # type: ignore[arg-type]
    if size % batches.batch_size:
        raise BayeslimError(
            f"The exact potential needs all {size} examples, and the loader leaves out the last "
            f"{size % batches.batch_size}. Pass a loader with drop_last=False."
        )


class FlatWeights:
    """The weights of a network that move, as a vector to read and write."""

    def __init__(self, bnn: Bayesian, moving: Moving):
        self.bnn, self.moving = bnn, moving
        self.parameters = moving.parameters(bnn)
        masks = [moving.masks.get(name) for name in moving.names]
        self.kept = [None if mask is None else mask.to(device_of(bnn.model)).flatten() for mask in masks]
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

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        pairs = zip(tensors, self.kept, strict=True)
        return torch.cat([t.flatten() if kept is None else t.flatten()[kept] for t, kept in pairs])


class FullBatch(FlatWeights):
    """U / T as a function of the weights that move, flattened, for p(w|D)^(1/T).

    The network must be in evaluation mode. Evaluating U overwrites its weights.
    """

    def __init__(self, bnn: Bayesian, moving: Moving, loader: Any, temperature: float = 1.0):
        check_leaves_none_out(loader)
        super().__init__(bnn, moving)
        self.temperature = temperature
        device = device_of(bnn.model)
        with kept_random_state():  # a chain draws the same numbers, whether reading the data draws some or not
            self.batches = [to_device(split_batch(batch), device) for batch in loader]
        check_labelled(bnn.likelihood, (targets for _, targets in self.batches))

    def __call__(self, vector: Tensor) -> tuple[float, Tensor]:
        """Compute U and its gradient at a vector of weights."""
        self.put(vector)
        energy, total = 0.0, torch.zeros_like(vector)
        for index, batch in enumerate(self.batches):
            with torch.enable_grad():
                value = _energy_with_prior(self.bnn, batch) if index == 0 else _energy(self.bnn, batch)
                gradients = torch.autograd.grad(value, self.parameters, materialize_grads=True)
            energy += float(value.detach().double())
            total += self._joined(gradients)
        return energy / self.temperature, total / self.temperature


class FullBatches:
    """U / T of every network of a stack, as a function of the weights of all that move, (S, D).

    Args:
        stack: the networks, in evaluation mode; it is not changed.
        moving: the weights of each, of one number, which may stand in different places.
        loader: passes over the data of each. Data that all have in common are held once.
        temperature: T.
    """

    def __init__(self, stack: Stack, moving: Sequence[Moving], loader: AbreastLoader, temperature: float = 1.0):
        self.stack, self.temperature = stack, temperature
        first, device = loader.loaders[0], device_of(stack.model)
        self.shared = all(one is first for one in loader.loaders)  # the order of examples does not change their sum
        self.batches = [to_device(split_batch(batch), device) for batch in (first if self.shared else loader)]
        for place in range(1 if self.shared else stack.networks):
            own = (targets if self.shared else targets[place] for _, targets in self.batches)
            check_labelled(stack.likelihood, own)
        self.tensors = {name: tensor.detach() for name, tensor in tensors_of(stack).items()}
        names = dict.fromkeys(name for own in moving for name in own.names)
        self.parameters = {f"model.{name}": self.tensors[f"model.{name}"] for name in names}
        self.weights = torch.cat([flattened(p, 1) for p in self.parameters.values()], 1)
        self.sizes = [p[0].numel() for p in self.parameters.values()]
        numbers = dict(zip(names, torch.arange(sum(self.sizes), device=device).split(self.sizes), strict=True))
        self.moving = torch.stack([
            torch.cat([
                numbers[name][own.masks[name].to(device).flatten()] if name in own.masks else numbers[name]
                for name in own.names
            ])
            for own in moving
        ])  # fmt: skip

    def __call__(self, vectors: Tensor) -> tuple[list[float], Tensor]:
        """Compute U and its gradient for every network at its vector of weights."""
        energies, total = vectors.new_zeros(len(vectors), dtype=torch.float64), torch.zeros_like(vectors)
        for index, batch in enumerate(self.batches):
            with torch.enable_grad():
                own = vectors.detach().requires_grad_()
                function = _energy_with_prior if index == 0 else _energy
                values = self.stack.each(function, self._at(own), batch, shared=self.shared)
                (gradients,) = torch.autograd.grad(values.sum(), own, materialize_grads=True)
            energies += values.detach()
            total += gradients
        return (energies / self.temperature).tolist(), total / self.temperature

    def _at(self, vectors: Tensor) -> Params:
        """Put weights in the place of those of the stack."""
        parts = self.weights.scatter(1, self.moving, vectors.to(self.weights)).split(self.sizes, 1)
        pairs = zip(self.parameters.items(), parts, strict=True)
        return self.tensors | {name: part.view_as(p).to(p.dtype) for (name, p), part in pairs}


def _energy(bnn: Bayesian, batch: Batch) -> Tensor:
    """Compute −log p(y|x, w) of a batch."""
    inputs, targets = batch
    try:
        outputs = call(bnn.model, inputs)
    except (RuntimeError, ValueError) as error:
        note_inputs(error, bnn.model, inputs)
        raise
    return -bnn.likelihood.log_prob(outputs, targets).sum()


def _energy_with_prior(bnn: Bayesian, batch: Batch) -> Tensor:
    """Compute −log p(y|x, w) of a batch − log p(w)."""
    return _energy(bnn, batch) - bnn.log_prior()
