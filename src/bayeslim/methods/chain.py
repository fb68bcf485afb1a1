"""Chains of layers: S networks called on the same inputs at once.

`vmap` takes longer than small networks themselves, and so does finding out what is in a network, so that a chain can be
kept. The first product or convolution is one for all networks. From there on they have values of their own: maps,
(B, S · channels, ...), which convolutions take in S groups, or rows, (S, features, B), which products take
and give as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeslim.blas import IS_ARM, competes, rows_along
from bayeslim.errors import ShapeMismatch
from bayeslim.fused import SAME
from bayeslim.stochastic import plain_type
from bayeslim.types import Params

ELEMENTWISE = frozenset({
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
})  # fmt: skip
_POOLS: dict[type[nn.Module], int] = {
    nn.MaxPool1d: 3, nn.AvgPool1d: 3, nn.AdaptiveAvgPool1d: 3, nn.AdaptiveMaxPool1d: 3,
    nn.MaxPool2d: 4, nn.AvgPool2d: 4, nn.AdaptiveAvgPool2d: 4, nn.AdaptiveMaxPool2d: 4,
}  # fmt: skip
_NORMS: dict[type[nn.Module], tuple[int, ...]] = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,)}
"""Of values of how many dimensions each is."""
_CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d}
_CHAINED = ELEMENTWISE | SAME | _POOLS.keys() | _NORMS.keys() | _CONVOLUTIONS.keys() | {nn.Linear, nn.Flatten}

FEW = 2**8
"""Of how many inputs calls take longer than what they compute."""
VERY_FEW, HEAVY, MANY, WIDE = 3, 2**16, 2**6, 2**8
"""Of how many inputs at most x Wᵀ takes less time than W xᵀ on a CPU, a third of it, of twice as many by how many
weights of all networks, and of more than how many by how many units, a tenth less."""
CLASSES, SEVERAL = 32, 2**5
"""How many classes are to lie along memory, where softmax wants them, of more than how many inputs."""

Function = Callable[[Tensor], Tensor]

IN_PLACE: dict[type[nn.Module], Function] = {
    nn.ReLU: Tensor.relu_, nn.Tanh: Tensor.tanh_, nn.Sigmoid: Tensor.sigmoid_, nn.SiLU: partial(F.silu, inplace=True),
}  # fmt: skip
"""What writes over values that nobody else reads."""


@dataclass(frozen=True, eq=False)
class Chain:
    """S networks, ready for inputs.

    Attributes:
        layers: of the model.
        stack: the parameters and buffers of all networks.
        before: functions of what is the same for all networks.
        dimensions: of what the first layer takes that is not.
        weight: of that layer, (S, *shape).
        own: the model's own parameters there.
        after: that layer, and functions of what is not the same.
        in_rows: whether the last of them gives rows, and not maps.
        lasts: whether all of it are views of the stack, so that whoever has that may keep it.
    """

    layers: tuple[nn.Module | None, ...]
    stack: list[Tensor]
    before: list[Function]
    dimensions: int
    weight: Tensor
    own: Mapping[str, Any]
    after: list[Function]
    in_rows: bool
    lasts: bool

    def is_of(self, model: nn.Module, stack: Params) -> bool:
        """Whether a model and a stack would make the same now."""
        return (
            self.layers == tuple(model._modules.values())
            and len(self.stack) == len(stack)
            and all(map(is_, self.stack, stack.values()))
            and fits(self.weight, self.own["weight"])
        )

    def __call__(self, x: Tensor) -> Tensor | None:
        """The outputs, (S, B, ...); None for inputs of other dimensions than those of a batch.

        On a CPU they lie in memory as the last layer gives them: examples may be along it.
        """
        for function in self.before:
            x = function(x)
        if x.ndim != self.dimensions:
            return None
        if x.shape[1] != self.weight.shape[2]:
            raise features_differ(self.weight.shape[2], x)
        for function in self.after:
            x = function(x)
        outputs: Tensor = x.mT if self.in_rows else x.unflatten(1, (len(self.weight), -1)).movedim(1, 0)
        return outputs if x.is_cpu and self.in_rows else outputs.contiguous()


def chain_of(model: nn.Module, stack: Params) -> Chain | None:
    """The chain that networks are; None where a layer is not known, or something in the stack would not be read."""
    if type(model) is not nn.Sequential:
        return None
    layers: Any = model._modules
    kinds = [kind if (kind := type(layer)) in _CHAINED else plain_type(layer) for layer in layers.values()]
    if not _CHAINED.issuperset(kinds):
        return None
    last = next((n for kind, n in zip(reversed(kinds), reversed(layers), strict=True) if kind not in SAME), "")
    links = _Links(model, stack, not _NORMS.keys().isdisjoint(kinds), last)
    for kind, (name, layer) in zip(kinds, layers.items(), strict=True):
        if not links.takes(kind, name, layer):
            return None
    return links.chain()


class _Links:
    """A chain in the making.

    Args:
        model: the architecture.
        stack: the parameters and buffers of all networks.
        has_norms: whether there are batch norms, which want examples along memory.
        last: the name of the layer that gives the outputs.
    """

    def __init__(self, model: nn.Module, stack: Params, has_norms: bool, last: str):
        self.model, self.stack, self.has_norms, self.last = model, stack, has_norms, last
        self.members = len(next(iter(stack.values())))
        self.before: list[Function] = []
        self.after: list[Function] = []
        self.first: tuple[Tensor, Mapping[str, Any]] | None = None
        self.in_rows = False
        self.unread = len(stack)
        self.lasts = True

    def takes(self, kind: type[nn.Module], name: str, layer: Any) -> bool:
        """Add a layer; False if it cannot be added."""
        if kind is nn.Linear or kind in _CONVOLUTIONS:
            return self._product(kind, name, layer)
        if kind in _NORMS:
            return self._norm(kind, name, layer)
        if kind is nn.Flatten:
            return self._flatten(layer)
        if kind in SAME:
            return True
        if self.first is None:
            self.before.append(layer)
        elif kind in _POOLS and (_POOLS[kind] != self._dimensions() or getattr(layer, "return_indices", False)):
            return False
        else:
            self.after.append(IN_PLACE.get(kind, layer))
        return True

    def chain(self) -> Chain | None:
        """All layers that were added, if they read all of the stack."""
        if self.first is None or self.unread:
            return None
        every, (weight, own) = tuple(self.model._modules.values()), self.first
        dimensions = weight.ndim - 1
        return Chain(
            every, list(self.stack.values()), self.before, dimensions, weight, own, self.after, self.in_rows, self.lasts
        )

    def _dimensions(self) -> int:
        """Of what there is of every network: rows, or maps such as the first convolution gives."""
        return 2 if self.first is None or self.in_rows else self.first[0].ndim - 1

    def _product(self, kind: type[nn.Module], name: str, layer: Any) -> bool:
        own: Mapping[str, Any] = layer._parameters  # as attributes they take a while of all this to read
        if not {"weight", "bias"} <= own.keys():
            return False  # what stands in for a parameter is none
        given = [leaf for leaf in ("weight", "bias") if _path(name, leaf) in self.stack]
        if len(given) < 1 + (own["bias"] is not None):
            if has_ties(self.model):
                return False  # tied weights are in the stack under one of their names
            if not given and self.first is None:
                self.before.append(layer)
                return True
        weight, bias = self._of_all(name, "weight", own), self._of_all(name, "bias", own)
        assert weight is not None
        if kind in _CONVOLUTIONS:
            if layer.padding_mode != "zeros" or self.in_rows or (self.first is None and layer.groups > 1):
                return False
            groups = 1 if self.first is None else self.members * layer.groups
            every = self._joined(weight), None if bias is None else self._joined(bias)
            self.after.append(_convolution(_CONVOLUTIONS[kind], layer, *every, groups))
        elif self.first is None:
            self.in_rows = True
            row = None if bias is None else self._joined(bias)
            biases = None if row is None else (row, row.unsqueeze(-1))
            joined = self._joined(weight)
            few, many = _few_and_many(weight, self.has_norms, self._gives_classes(name, weight, joined))
            self.after.append(partial(_first_product, joined, biases, self.members, few, many))
        elif not self.in_rows:
            return False
        elif bias is None:
            self.after.append(partial(torch.bmm, weight))
        else:
            many = SEVERAL if self._gives_classes(name, weight, weight[0]) else math.inf
            self.after.append(partial(_product, weight, weight.mT, bias.unsqueeze(-1), many))
        self.first = self.first or (weight, own)
        return True

    def _gives_classes(self, name: str, weight: Tensor, matrix: Tensor) -> bool:
        """Whether a layer gives many classes, which a product with that matrix can well put along memory."""
        return name == self.last and weight.shape[1] >= CLASSES and not competes(matrix)

    def _norm(self, kind: type[nn.Module], name: str, layer: Any) -> bool:
        slots = layer._parameters | layer._buffers
        if not {"weight", "bias", "running_mean", "running_var"} <= slots.keys():
            return False
        self.unread -= _path(name, "num_batches_tracked") in self.stack
        mean, variance = self._of_all(name, "running_mean", slots), self._of_all(name, "running_var", slots)
        weight, bias = self._of_all(name, "weight", slots), self._of_all(name, "bias", slots)
        if self.first is None or self._dimensions() not in _NORMS[kind] or has_ties(self.model):
            return False
        if layer.training or mean is None or variance is None:
            return False
        weight, bias = (None if tensor is None else self._joined(tensor) for tensor in (weight, bias))
        norm = partial(_batch_norm, layer, self._joined(mean), self._joined(variance), weight, bias)
        self.after.append(partial(_normed_rows, norm) if self.in_rows else norm)
        return True

    def _flatten(self, layer: nn.Flatten) -> bool:
        if layer.start_dim != 1 or layer.end_dim != -1:
            return False
        if self.first is None:
            self.before.append(_flat)
        elif not self.in_rows:
            self.after.append(partial(_rows_of, self.members))
            self.in_rows = True
        return True

    def _of_all(self, name: str, leaf: str, slots: Mapping[str, Any]) -> Tensor | None:
        """A tensor of every network, (S, *shape), that fits the model's own; its own, where networks have none."""
        own: Tensor | None = slots[leaf]
        values = self.stack.get(_path(name, leaf))
        if own is None:
            return None
        if values is None:
            self.lasts = False
            return own.expand(self.members, *own.shape)
        self.unread -= 1
        if not fits(values, own):
            self.lasts = False
            values = values.to(own)
        return values

    def _joined(self, values: Tensor) -> Tensor:
        """All networks' units in a row, (S · units, ...)."""
        self.lasts = self.lasts and values.is_contiguous()
        return values.flatten(0, 1)


def features_differ(features: int, x: Tensor) -> ShapeMismatch:
    """What to say of inputs that have others than a layer takes."""
    kind = "features" if x.ndim == 2 else "channels"
    return ShapeMismatch(
        f"The first layer with weights takes {features} {kind}, and was given {x.shape[1]}, in a batch of shape "
        f"{tuple(x.shape)}. Give inputs such as the network was trained on, examples first."
    )


def _path(name: str, leaf: str) -> str:
    """Of a tensor; a network that is but a layer has no name for that."""
    return f"{name}.{leaf}" if name else leaf


def _few_and_many(weight: Tensor, has_norms: bool, gives_classes: bool) -> tuple[int, float]:
    """Up to how many inputs, and of more than how many, x Wᵀ of all networks takes less time than W xᵀ on a CPU."""
    if IS_ARM:
        return rows_along(weight), 1 if gives_classes else math.inf
    is_wide = gives_classes or (weight.shape[1] >= WIDE and not has_norms)
    is_heavy = weight.numel() >= HEAVY and not has_norms
    return 2 * VERY_FEW if is_heavy else VERY_FEW, MANY if is_wide else math.inf


def _first_product(
    weight: Tensor, biases: tuple[Tensor, Tensor] | None, members: int, few: int, many: float, x: Tensor
) -> Tensor:
    """Of all networks on the same inputs; features lie along memory of few, and of many.

    Biases are given as a row and as a column.
    """
    if x.is_cpu and not few < x.shape[0] <= many:
        x = F.linear(x, weight, biases and biases[0])
        return x.view(x.shape[0], members, -1).permute(1, 2, 0)
    x = x.mT
    if biases is None:
        x = weight @ x
    elif adds_later(x):
        x = (weight @ x).add_(biases[1])
    else:
        x = torch.addmm(biases[1], weight, x)
    return x.view(members, -1, x.shape[1])


def adds_later(x: Tensor) -> bool:
    """Whether biases are quicker to add to products than to start these from."""
    return x.is_cpu and not IS_ARM


def _product(weight: Tensor, turned: Tensor, bias: Tensor, many: float, x: Tensor) -> Tensor:
    """Of each network on its own values; features lie along memory of many, and where they do so already.

    `turned` is Wᵀ, which takes a while to get to.
    """
    along = x.is_cpu and x.shape[2] > many
    if not adds_later(x):
        return torch.baddbmm(bias.mT, x.mT, turned).mT if along else torch.baddbmm(bias, weight, x)
    if along or x.stride(1) == 1:
        return torch.bmm(x.mT, turned).mT.add_(bias)
    return torch.bmm(weight, x).add_(bias)


def _convolution(
    convolve: Callable[..., Tensor], layer: Any, weight: Tensor, bias: Tensor | None, groups: int
) -> Function:
    def convolved(x: Tensor) -> Tensor:
        return convolve(x, weight, bias, layer.stride, layer.padding, layer.dilation, groups)

    return convolved


def _batch_norm(
    layer: Any, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, x: Tensor
) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias, eps=layer.eps)


def _normed_rows(norm: Function, x: Tensor) -> Tensor:
    """Batch norms of all networks, to which features are channels of one example."""
    return norm(x.reshape(1, -1, x.shape[-1])).view(x.shape)


def _rows_of(members: int, x: Tensor) -> Tensor:
    """Maps of all networks, (B, S · C, ...), as rows, (S, features, B)."""
    return x.reshape(x.shape[0], members, -1).permute(1, 2, 0)


def _flat(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.flatten(1)


def fits(values: Tensor, own: Tensor) -> bool:
    """Whether both are of one precision and on one device; `to` would take longer to see that."""
    return values.dtype == own.dtype and values.device == own.device


def has_ties(model: nn.Module) -> bool:
    """Whether a parameter stands in several places."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return len(set(model.parameters())) < len(names)
