"""Networks trained abreast: S networks of one architecture as one, under one `vmap`.

Where networks are so small that a training step is mostly the calling of it, S steps cost little more than one. Every
parameter and buffer is stacked, (S, *shape), inputs and outputs are (S, B, ...), and nothing that one network computes
depends on another: a step on the sum of their losses is a step of each on its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.graphs import Graph
from bayeslim.methods.braid import Braid, at_once
from bayeslim.methods.chain import ELEMENTWISE, FEW, Chain
from bayeslim.posteriors.particles import stacked, tensors_of
from bayeslim.stochastic import plain_type
from bayeslim.types import Inputs, Params, batch_size, call

SKELETON = "skeleton."
"""What comes before a parameter's own name in the stack."""

_TOGETHER = ELEMENTWISE | {
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Linear, nn.Bilinear, nn.Flatten, nn.Unflatten, nn.LayerNorm,
    nn.BatchNorm1d, nn.Softmax, nn.LogSoftmax,
}  # fmt: skip
_MOST_WEIGHTS = {"cpu": 100_000, "cuda": 1_000_000}


def is_faster(model: nn.Module) -> bool:
    """Whether training such networks abreast is known to work and to be faster: small ones made of linear layers.

    Convolutions with weights of their own each are slower than one network after the other.
    """
    weights = list(model.parameters())
    return dense_width(model) > 0 and sum(p.numel() for p in weights) <= _MOST_WEIGHTS.get(weights[0].device.type, 0)


def dense_width(model: nn.Module) -> int:
    """How many values the widest layer gives for an input, of a network made of linear layers.

    0 where there is anything that is not known to go along with them under `vmap`.
    """
    widest = 1
    modules: list[Any] = [model]
    for module in modules:
        own = vars(module)
        known = type(module) in _TOGETHER or plain_type(module) in _TOGETHER
        known = known or (isinstance(module, Graph) and module.abreast is not None)
        if not known or own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            return 0
        if type(module) is nn.Linear:  # reading its shapes takes longer
            widest = max(widest, own["out_features"])
            continue
        for parameter in own["_parameters"].values():
            if parameter is not None and parameter.ndim:
                widest = max(widest, parameter.shape[0])
        modules += own["_modules"].values()
    return widest


def outputs_abreast(
    model: nn.Module, stack: Params, inputs: Inputs, chain: Chain | Braid | None = None
) -> Tensor | None:
    """The outputs of S networks on the same inputs, (S, B, ...), in evaluation mode; None where that would be slower.

    A chain of linear layers takes less time for any number of inputs than network after network, as the first product
    is one for all; others do for few.

    Args:
        model: their architecture, which has a `dense_width` or is a chain.
        stack: the parameters and buffers of all of them, (S, *shape) by name, in any precision and on any device.
        inputs: (B, ...).
        chain: of these, if there is one that is known.
    """
    chain = chain or at_once(model, stack)
    if chain is not None and isinstance(inputs, Tensor):
        outputs = chain(inputs)
        if outputs is not None:
            return outputs
    if batch_size(inputs) > FEW or not dense_width(model):
        return None
    own = tensors_of(model)
    fitting = {name: value.to(own[name]) for name, value in stack.items()}
    return vmap(lambda tensors: call(model, inputs, tensors))(fitting)


class Abreast(nn.Module):
    """S networks as one.

    Args:
        model: their architecture; it is copied.
        networks: the parameters and buffers of each; those that one does not name are the model's.
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
        """The outputs of every network on inputs of its own, (S, B, ...) to (S, B, ...)."""
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
        """The parameters and buffers of all networks under their own names, (S, *shape)."""
        return {name: tensor.detach() for name, tensor in tensors_of(self.skeleton).items()}


class AbreastLoader:
    """S passes over a loader at once, each in an order of its own, their batches stacked.

    Args:
        loader: the batches; whatever else it has can be reached through this one.
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
                f"{type(self.loader).__name__} cannot be gone over {self.members} times at once (persistent_workers). "
                "Use one that can, or DeepEnsemble(together=False)."
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
            "Use DeepEnsemble(together=False)."
        )
    return torch.stack(parts)
