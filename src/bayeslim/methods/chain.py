"""Chains of linear layers and functions of single values: S such networks called on the same inputs.

`vmap` takes longer than small networks themselves, and so does finding out what is in a network, so that a chain can be
kept. The first product is one for all networks. From there on they have values of their own, (S, features, B), which
products take and give as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.blas import IS_ARM
from bayeslim.stochastic import plain_type
from bayeslim.types import Params

ELEMENTWISE = frozenset({
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
})  # fmt: skip
_CHAINED = ELEMENTWISE | {nn.Linear, nn.Flatten}

FEW = 2**8
"""Of how many inputs calls take longer than what they compute."""


@dataclass(frozen=True, eq=False)
class Chain:
    """S networks, ready for inputs.

    Attributes:
        layers: of the model.
        stack: the parameters of all networks.
        before: functions of what is the same for all networks.
        weight: of the first layer that is not, (S, O, I).
        own: the model's own parameters there.
        product: the same weights as one matrix, (S·O, I).
        bias: (S·O, 1).
        after: functions of what is not.
        lasts: whether all of it are views of the stack, so that whoever has that may keep it.
    """

    layers: tuple[nn.Module | None, ...]
    stack: list[Tensor]
    before: list[Callable[[Tensor], Tensor]]
    weight: Tensor
    own: Mapping[str, Any]
    product: Tensor
    bias: Tensor | None
    after: list[Callable[[Tensor], Tensor]]
    lasts: bool

    def is_of(self, model: nn.Module, stack: Params) -> bool:
        """Whether a model and a stack would make the same now."""
        return (
            self.layers == tuple(model._modules.values())
            and len(self.stack) == len(stack)
            and all(map(is_, self.stack, stack.values()))
            and _fits(self.weight, self.own["weight"])
        )

    def __call__(self, x: Tensor) -> Tensor | None:
        """The outputs, (S, B, ...); None for inputs of other dimensions than (B, features)."""
        for function in self.before:
            x = function(x)
        if x.ndim != 2:
            return None
        x = x.mT
        if self.bias is None:
            x = self.product @ x
        elif IS_ARM or x.shape[1] > FEW:
            x = torch.addmm(self.bias, self.product, x)
        else:  # on other CPUs `addmm` takes longer with several threads
            x = (self.product @ x).add_(self.bias)
        members, outputs, _ = self.weight.shape
        x = x.view(members, outputs, -1)
        for function in self.after:
            x = function(x)
        return x.mT.contiguous()


def chain_of(model: nn.Module, stack: Params) -> Chain | None:
    """The chain that networks are; None where a layer is not known, or something in the stack would not be read."""
    if type(model) is not nn.Sequential:
        return None
    layers: Any = model._modules
    kinds = [kind if (kind := type(layer)) in _CHAINED else plain_type(layer) for layer in layers.values()]
    if not _CHAINED.issuperset(kinds):
        return None
    first: tuple[Tensor, Tensor | None, Mapping[str, Any]] | None = None
    before: list[Callable[[Tensor], Tensor]] = []
    after: list[Callable[[Tensor], Tensor]] = []
    used: list[Tensor] = []
    unread = len(stack)
    for kind, (name, layer) in zip(kinds, layers.items(), strict=True):
        if kind is nn.Linear:
            own: Mapping[str, Any] = layer._parameters  # as attributes they take a while of all this to read
            weight, bias = stack.get(f"{name}.weight"), stack.get(f"{name}.bias")
            unread -= (weight is not None) + (bias is not None)
            if weight is None or (bias is None and own["bias"] is not None):
                if _has_ties(model):
                    return None  # tied weights are in the stack under one of their names
                if weight is None and bias is None and first is None:
                    before.append(layer)
                    continue
            members = len(next(iter(stack.values())))
            weight = _of_all(weight, own["weight"], members)
            bias = None if own["bias"] is None else _of_all(bias, own["bias"], members)
            used += [weight] if bias is None else [weight, bias]
            if first is None:
                first = weight, bias, own
            elif bias is None:
                after.append(partial(torch.bmm, weight))
            else:
                after.append(partial(torch.baddbmm, bias.unsqueeze(-1), weight))
        elif kind is nn.Flatten:
            if layer.start_dim != 1:
                return None
            if first is None:
                before.append(partial(_flat, layer))
        elif first is None:
            before.append(layer)
        else:
            after.append(Tensor.relu_ if kind is nn.ReLU else layer)
    if first is None or unread:
        return None
    weight, bias, own = first
    lasts = {id(tensor) for tensor in used} <= {id(tensor) for tensor in stack.values()}
    lasts = lasts and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    column = None if bias is None else bias.reshape(-1, 1)
    every = tuple(layers.values())
    return Chain(every, list(stack.values()), before, weight, own, weight.flatten(0, 1), column, after, lasts)


def fused_pass(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """`model` as a function of one tensor, with ReLUs as part of the products before them; None where it is no chain.

    On a GPU that is kept busy, networks go one after the other, and each so takes a twentieth less than its own call.
    """
    if type(model) is not nn.Sequential or not all(plain_type(layer) in _CHAINED for layer in model):
        return None
    layers: list[Any] = list(model)

    def fused(x: Tensor) -> Tensor:
        done = False
        for layer, after in zip(layers, [*layers[1:], None], strict=True):
            if done:
                done = False
            elif type(after) is nn.ReLU and plain_type(layer) is nn.Linear and layer.bias is not None and x.ndim == 2:
                x, done = torch._addmm_activation(layer.bias, x, layer.weight.mT), True
            else:
                x = layer(x)
        return x

    return fused


def _flat(layer: nn.Flatten, x: Tensor) -> Tensor:
    return x if x.ndim == 2 else layer(x)


def _of_all(values: Tensor | None, own: Tensor, members: int) -> Tensor:
    """A parameter of every network, (S, *shape), that fits the model's own; its own, where networks have none."""
    if values is None:
        return own.expand(members, *own.shape)
    return values if _fits(values, own) else values.to(own)


def _fits(values: Tensor, own: Tensor) -> bool:
    """Whether both are of one precision and on one device; `to` would take longer to see that."""
    return values.dtype == own.dtype and values.device == own.device


def _has_ties(model: nn.Module) -> bool:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return len(set(model.parameters())) < len(names)
