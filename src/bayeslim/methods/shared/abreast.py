"""Networks trained abreast: S networks of one architecture as one module with stacked parameters.

A training step of a small network is mostly overhead, so S steps under one `vmap` cost little more than one. Every
parameter and buffer is stacked, (S, *shape), and nothing that one network computes depends on another: a step on the
sum of their losses is a step of each on its own. The members of an ensemble each see batches of their own, (S, B, ...);
the particles of `SVGD` all see the same batch.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from bayeslim.bayesian import Bayesian
from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.posteriors.particles import Particles, stacked, tensors_of
from bayeslim.results import Fit
from bayeslim.stochastic import plain_type
from bayeslim.train.fit import fit
from bayeslim.train.loaders import training_set_size
from bayeslim.types import Inputs, Params, call, device_of

SKELETON = "skeleton."
"""The prefix of a parameter's own name in the stack."""

VMAPPED_TYPES = frozenset({
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Linear, nn.Bilinear, nn.Flatten, nn.Unflatten, nn.LayerNorm,
    nn.BatchNorm1d, nn.Softmax, nn.LogSoftmax, nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU,
    nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
})  # fmt: skip
"""Modules that are known to work under `vmap` with weights of their own for every network, and to gain from it."""

MAX_WEIGHTS_PER_NETWORK = {"cpu": 100_000, "cuda": 1_000_000}


def is_faster(model: nn.Module) -> bool:
    """Check whether networks train faster abreast: small ones of linear layers, without hooks.

    Convolutions with different weights are slower under `vmap` than one network after the other.
    """
    weights = list(model.parameters())
    if sum(p.numel() for p in weights) > MAX_WEIGHTS_PER_NETWORK.get(weights[0].device.type, 0):
        return False
    return all(
        plain_type(module) in VMAPPED_TYPES
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
        for module in model.modules()
    )


class Abreast(nn.Module):
    """S networks as one.

    Args:
        model: their architecture; it is copied.
        networks: the parameters and buffers of each by name; the others are the model's own, the same for all.
        one_batch: whether all networks see the same inputs, (B, ...). They then run vmapped only where that is faster,
            else one after the other, which works for any module.
    """

    def __init__(self, model: nn.Module, networks: list[Params], one_batch: bool = False):
        super().__init__()
        self.members, self.one_batch = len(networks), one_batch
        self.together = not one_batch or is_faster(model)
        self.skeleton = copy.deepcopy(model)
        now, values = tensors_of(self.skeleton), stacked(networks)
        stack_tensors(self.skeleton, {name: values[name] for name in now if name in values})
        self.stacked = [name for name in now if name in values]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call every network on its inputs, to (S, B, ...)."""
        inputs: Inputs = kwargs or args
        tensors = tensors_of(self.skeleton)
        if not self.together:
            apart = {name: tensors[name].unbind() for name in self.stacked}
            each = (tensors | {name: parts[k] for name, parts in apart.items()} for k in range(self.members))
            return torch.stack([call(self.skeleton, inputs, own) for own in each])
        in_dims = {name: 0 if name in self.stacked else None for name in tensors}, None if self.one_batch else 0

        def of_one(own: Params, inputs: Inputs) -> Tensor:
            return call(self.skeleton, inputs, own)

        try:
            outputs: Tensor = vmap(of_one, in_dims, randomness="different")(tensors, inputs)
        except RuntimeError as error:
            raise_if_of_vmap(
                error,
                f"{type(self.skeleton).__name__} cannot be trained abreast, under one vmap: {error} "
                "Use DeepEnsemble(together=False).",
            )
            raise
        return outputs

    def tensors(self) -> Params:
        """Return the stacked parameters and buffers by name, (S, *shape)."""
        return {name: tensor.detach() for name, tensor in tensors_of(self.skeleton).items() if name in self.stacked}


def stack_tensors(model: nn.Module, values: Params) -> None:
    """Replace tensors of a model by stacks, in all slots of tied ones; parameters stay parameters."""
    stacks: dict[Tensor, Tensor] = {}
    for name, tensor in tensors_of(model).items():
        if name in values:
            is_parameter = isinstance(tensor, nn.Parameter)
            stacks[tensor] = nn.Parameter(values[name], tensor.requires_grad) if is_parameter else values[name]
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for slots in both:
            slots.update({leaf: stacks[tensor] for leaf, tensor in slots.items() if tensor in stacks})


def raise_if_of_vmap(error: RuntimeError, message: str) -> None:
    """Raise an `UnsupportedModel` for an error of `vmap`; return for any other."""
    if "atching rule" in str(error) or "vmap" in str(error):
        raise UnsupportedModel(message) from error


def fit_abreast(
    bnn: Bayesian,
    networks: list[Params],
    loader: Any,
    *,
    one_batch: bool = False,
    optimizer: Callable[[Bayesian], torch.optim.Optimizer] | None = None,
    **training: Any,
) -> tuple[Fit, Particles]:
    """Train networks abreast, by the loss of the method of `bnn`.

    `networks` holds the random and other trained tensors of each, by name; `optimizer` makes one for all of them. The
    record has means over the networks; the counts of steps and examples go to `bnn`.
    """
    abreast = Abreast(bnn.model, networks, one_batch)
    exact = {re.compile(re.escape(SKELETON + name)): bnn.priors.given[name] for name in bnn.sites.names}
    together = Bayesian(abreast, bnn.method, bnn.likelihood, exact, list(exact), training_set_size(bnn, loader))
    together.train(bnn.training)
    together.masks = {SKELETON + name: mask for name, mask in bnn.masks.items()}
    together.step, together.seed = bnn.step, bnn.seed
    batches = loader if one_batch else AbreastLoader(loader, len(networks))
    made = None if optimizer is None else optimizer(together)
    result = fit(together, batches, optimizer=made, **training)
    bnn.to(device_of(abreast))
    bnn.step, bnn.num_data, bnn.steps_per_epoch = together.step, together.num_data, together.steps_per_epoch
    average_history(result, len(networks))
    tensors = abreast.tensors()
    values = {name: tensors.pop(name) for name in bnn.sites.names}
    return result, Particles(values, buffers=tensors)


def average_history(result: Fit, count: int) -> None:
    """Divide the sums over networks in a record by their number."""
    for epoch in result.history:
        epoch.update({key: epoch[key] / count for key in ("nll", "kl", "loss")})


class AbreastLoader:
    """S passes over a loader at once, each in an order of its own, their batches stacked.

    Args:
        loader: the batches; its other attributes can be read from this one.
        members: S.
    """

    def __init__(self, loader: Any, members: int):
        self.loader, self.members = loader, members

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        passes = [iter(self.loader) for _ in range(self.members)]
        if len({id(one) for one in passes}) < self.members:
            raise TypeError(
                f"{type(self.loader).__name__} cannot be iterated {self.members} times at once (persistent_workers). "
                "Use one that can, or train the networks one by one, as DeepEnsemble(together=False) does."
            )
        return (_side_by_side(batches) for batches in zip(*passes, strict=True))


def _side_by_side(parts: tuple[Any, ...]) -> Any:
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _side_by_side(tuple(part[key] for part in parts)) for key in first}
    if type(first) in (tuple, list):
        return tuple(_side_by_side(values) for values in zip(*parts, strict=True))
    if not isinstance(first, Tensor) or any(part.shape != first.shape for part in parts):
        given = ", ".join(str(tuple(getattr(part, "shape", ()))) for part in parts)
        raise ShapeMismatch(
            f"Training together stacks one batch of every network, which must be tensors of one shape. Got {given}. "
            "Train the networks one by one, as DeepEnsemble(together=False) does."
        )
    return torch.stack(parts)
