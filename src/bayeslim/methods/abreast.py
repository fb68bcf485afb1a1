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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from bayeslim.errors import ShapeMismatch
from bayeslim.posteriors.particles import stacked, tensors_of
from bayeslim.types import Inputs, Params, call, modules_of

SKELETON = "skeleton."
"""What comes before a parameter's own name in the stack."""

_ELEMENTWISE = (
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
)  # fmt: skip
_TOGETHER = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Linear, nn.Bilinear, nn.Flatten, nn.Unflatten, nn.LayerNorm,
    nn.BatchNorm1d, nn.Softmax, nn.LogSoftmax, *_ELEMENTWISE,
)  # fmt: skip
_MOST_WEIGHTS = {"cpu": 100_000, "cuda": 1_000_000}


def is_faster(model: nn.Module) -> bool:
    """Whether training such networks abreast is known to work and to be faster: small ones made of linear layers.

    Convolutions with weights of their own each are slower than one network after the other.
    """
    weights = list(model.parameters())
    return is_dense(model) and sum(p.numel() for p in weights) <= _MOST_WEIGHTS.get(weights[0].device.type, 0)


def is_dense(model: nn.Module) -> bool:
    """Whether a network is made of linear layers, and of what is known to go along with them under `vmap`."""
    return all(type(m) in _TOGETHER and not m._forward_hooks and not m._forward_pre_hooks for m in modules_of(model))


def outputs_abreast(model: nn.Module, stack: Params, inputs: Inputs) -> Tensor:
    """The outputs of S networks on the same inputs, (S, B, ...), in evaluation mode.

    Args:
        model: their architecture, for which `is_dense` holds.
        stack: the parameters and buffers of all of them, (S, *shape) by name.
        inputs: (B, ...).
    """
    if type(model) is nn.Sequential and isinstance(inputs, Tensor):
        outputs = _layer_by_layer(model, stack, inputs)
        if outputs is not None:
            return outputs
    return vmap(lambda tensors: call(model, inputs, tensors))(stack)


def _layer_by_layer(model: nn.Sequential, stack: Params, x: Tensor) -> Tensor | None:
    """The same without `vmap`, which takes longer than small networks themselves; None where a layer is not known."""
    layers = [(name, layer) for name, layer in model._modules.items() if layer is not None]
    own = [p for _, layer in layers for p in layer._parameters.values() if p is not None]
    if len(set(own)) < len(own):
        return None  # tied weights are in the stack under one of their names
    members = len(next(iter(stack.values())))
    apart = False  # whether the networks have values of their own yet
    for name, layer in layers:
        kind = type(layer)
        if isinstance(layer, nn.Linear) and (f"{name}.weight" in stack or f"{name}.bias" in stack):
            if x.ndim != 2 + apart:
                return None
            bias = None if layer.bias is None else _of_all(layer.bias, f"{name}.bias", stack, members)
            x, apart = _linear_abreast(x, _of_all(layer.weight, f"{name}.weight", stack, members), bias), True
        elif kind is nn.ReLU and apart:
            x = x.relu_()
        elif kind is nn.Linear or kind in _ELEMENTWISE or (kind is nn.Flatten and not apart):
            x = layer(x)
        else:
            return None
    return x if apart else None


def _of_all(own: Tensor, name: str, stack: Params, members: int) -> Tensor:
    """A parameter of every network, (S, *shape)."""
    return stack[name] if name in stack else own.expand(members, *own.shape)


def _linear_abreast(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of x for all, (B, I), or of one x for each, (S, B, I), by weights (S, O, I) and biases (S, O): (S, B, O)."""
    if x.ndim == 2:  # one product of matrices
        joint = F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
        return joint.view(len(x), *weight.shape[:2]).transpose(0, 1)
    x = (x * weight).sum(-1, keepdim=True) if weight.shape[1] == 1 else x @ weight.mT
    return x if bias is None else x.add_(bias.unsqueeze(1))


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
        outputs: Tensor = vmap(self._one, randomness="different")(tensors_of(self.skeleton), inputs)
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
