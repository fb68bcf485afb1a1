"""Networks trained abreast: S networks of one architecture as one, under one `vmap`.

A training step of a small network is mostly overhead, so S steps at once cost little more than one. Every
parameter and buffer is stacked, (S, *shape), inputs and outputs are (S, B, ...), and nothing that one network computes
depends on another: a step on the sum of their losses is a step of each on its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.posteriors.particles import stacked, tensors_of
from bayeslim.stochastic import plain_type
from bayeslim.types import Inputs, Params, call

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
    """Check whether networks train faster abreast.

    Small networks of linear layers without hooks do.

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
        networks: the parameters and buffers of each by name; the model's own are used for names that are missing.
    """

    def __init__(self, model: nn.Module, networks: list[Params]):
        super().__init__()
        self.members = len(networks)
        self.skeleton = copy.deepcopy(model)
        own = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        now = tensors_of(self.skeleton)
        stacks: dict[Tensor, Any] = {}
        for name, values in stacked([own | network for network in networks]).items():
            is_parameter = isinstance(now[name], nn.Parameter)
            stacks[now[name]] = nn.Parameter(values, requires_grad=name in trained) if is_parameter else values
        for module in self.skeleton.modules():
            for slots in (module._parameters, module._buffers):  # all of them, since tied tensors stand in several
                slots.update({leaf: stacks[tensor] for leaf, tensor in slots.items() if tensor in stacks})

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call every network on inputs of its own, (S, B, ...) to (S, B, ...)."""
        inputs: Inputs = kwargs or args
        try:
            outputs: Tensor = vmap(self._one, randomness="different")(tensors_of(self.skeleton), inputs)
        except RuntimeError as error:
            if "atching rule" not in str(error) and "vmap" not in str(error):
                raise
            raise UnsupportedModel(
                f"{type(self.skeleton).__name__} cannot be trained abreast, under one vmap: {error} "
                "Use DeepEnsemble(together=False)."
            ) from error
        return outputs

    def _one(self, tensors: Params, inputs: Inputs) -> Tensor:
        return call(self.skeleton, inputs, tensors)

    def tensors(self) -> Params:
        """Return the stacked parameters and buffers by name, (S, *shape)."""
        return {name: tensor.detach() for name, tensor in tensors_of(self.skeleton).items()}


class AbreastLoader:
    """S passes over loaders at once, their batches stacked.

    Args:
        loaders: of every network, of equal sizes; several may be one loader, which each passes over in an order of its
            own. Other attributes are those of the first.
    """

    def __init__(self, loaders: Sequence[Any]):
        self.loaders = list(loaders)

    def __len__(self) -> int:
        return len(self.loaders[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loaders[0], name)

    def __iter__(self) -> Iterator[Any]:
        passes = [iter(loader) for loader in self.loaders]
        if len({id(one) for one in passes}) < len(passes):
            raise TypeError(
                f"{type(self.loaders[0]).__name__} cannot be iterated {len(passes)} times at once "
                "(persistent_workers). Use one that can, or train the networks one by one, as "
                "DeepEnsemble(together=False) does."
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
