"""Liveness: which units are needed for the outputs.

A connection is *idle* if its weight is zero, or if it reads a constant that is zero or can be folded into the bias: a
constant with the same value at every position that is not read through a zero-padded convolution, whose border reads
less of it. A unit is needed if a needed unit (in the end, an output) reads it through a connection that is not idle.
This least fixed point also removes units that only feed themselves around a residual connection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from bayeslim.compact.channels import Channels, Contraction, Product
from bayeslim.compact.dependence import Dependence, is_projected
from bayeslim.compact.labels import slim
from bayeslim.compact.ops import Call

Constants: TypeAlias = Literal["all", "zero", "none"]
CONSTANTS: tuple[Constants, ...] = ("all", "zero", "none")
"""The constants that count as idle: those that can be folded into a bias too, only zeros, or none."""


class Liveness(Dependence):
    """The walk that finds idle connections and the classes that are needed.

    Args:
        channels: the labelled channels.
        tensors: the values of parameters and buffers, by name.
    """

    def __init__(self, channels: Channels, tensors: Mapping[str, Tensor]):
        super().__init__(channels.trace, tensors)
        self.channels = channels
        self.varies = {}
        self._constants: dict[int, Tensor] = {}
        self._idle: dict[Constants, dict[int, Tensor]] = {constants: {} for constants in CONSTANTS}
        self._multiplied: list[Tensor] = []
        self._contractions = _by_node(channels.contractions)
        self._products = _by_node(channels.products)
        self._uses = Counter(contraction.weight for contraction in channels.contractions)
        self.walk()

    def needed(self, seeds: Tensor, constants: Constants) -> Tensor:
        """Find the needed classes from seeds; both are masks over representatives.

        Args:
            seeds: classes that are needed anyway.
            constants: the constants whose connections count as idle.
        """
        idle = self._idle[constants]
        find = self.channels.labels.find
        need = seeds.clone()
        for labels in self._multiplied:
            need[find(labels)] = True
        edges = [(find(c.inputs), find(c.outputs), ~idle[k]) for k, c in enumerate(self.channels.contractions)]
        count = -1
        while count != (count := int(need.sum())):
            for inputs, outputs, live in reversed(edges):
                active = live & need[slim(outputs)]
                if slim(inputs).shape[0] == 1:
                    need[inputs[0][active.any(0)]] = True
                else:
                    need[inputs[active]] = True
        return need

    def folded(self, place: int, gone: Tensor) -> Tensor:
        """Sum the constants that removed inputs add to the bias, by output channel.

        Args:
            place: the index of the contraction.
            gone: mask over all labels, by representative.
        """
        contraction = self.channels.contractions[place]
        weight = _matrix(self.tensors[contraction.weight].double(), contraction)
        constants = self._constants[place].double()[contraction.channel]
        return (weight * constants * gone[self.channels.labels.find(contraction.inputs)]).sum(1)

    def marked(self, call: Call) -> None:
        """Inspect the connections of an operation."""
        for place, contraction in self._contractions.get(call.node, []):
            idle = ~_matrix(self.tensors[contraction.weight] != 0, contraction)
            if contraction.source is None:
                zero = folds = self._resting(call, contraction)
            else:
                value, still = self._steady(contraction.source, contraction.dim)
                own = self._uses[contraction.weight] == 1 and _is_own_bias(self.channels, contraction)
                self._constants[place] = torch.where(still, value, 0.0)
                zero = still & (value == 0)
                folds = still if contraction.bias is not None and own else zero
            for constants, channels in zip(CONSTANTS, (folds, zero, torch.zeros_like(zero)), strict=True):
                self._idle[constants][place] = idle | channels[contraction.channel]
        for _, product in self._products.get(call.node, []):
            self._multiplied.append(product.labels[~self._vanishes(product)])

    def _resting(self, call: Call, contraction: Contraction) -> Tensor:
        """Mark the units inside a recurrent layer that stay at zero."""
        width = contraction.channel.shape[1]
        if is_projected(call):
            return torch.zeros(width, dtype=torch.bool)
        resting = ~self.live_units(call)
        return resting.repeat(width // len(resting))

    def _steady(self, node: fx.Node, dim: int) -> tuple[Tensor, Tensor]:
        """Return a value of each channel, and where it is the only one."""
        channels = self.env[node].shape[dim]
        value = self.env[node].movedim(dim, 0).reshape(channels, -1)
        mark = self.varies[node].movedim(dim, 0).reshape(channels, -1)
        return value[:, 0], ~mark.any(1) & (value == value[:, :1]).all(1)

    def _vanishes(self, product: Product) -> Tensor:
        """Mark the channels of a product of activations that are zero on one side."""
        zero = torch.zeros(len(product.labels), dtype=torch.bool)
        for node, dim in zip(product.sources, product.dims, strict=True):
            zero |= ~self.live(node).movedim(dim, 0).reshape(len(zero), -1).any(1)
        return zero


def _is_own_bias(channels: Channels, contraction: Contraction) -> bool:
    """Return whether only the contraction reads its bias, so that the bias can change."""
    nodes = [node for node, name in channels.names.items() if name == contraction.bias]
    while nodes:
        nodes = [user for node in nodes for user in node.users]
        if nodes == [contraction.node]:
            return True
        if len(nodes) > 1:
            return False
    return False


def _matrix(weight: Tensor, contraction: Contraction) -> Tensor:
    """Sum a weight over its kernel, to (produces, reads)."""
    matrix = weight.movedim((contraction.produces, contraction.reads), (0, 1))
    if matrix.ndim == 2:
        return matrix
    return matrix.flatten(2).any(2) if weight.dtype == torch.bool else matrix.flatten(2).sum(2)


def _by_node(items: list[Any]) -> dict[fx.Node, list[tuple[int, Any]]]:
    result: dict[fx.Node, list[tuple[int, Any]]] = {}
    for place, item in enumerate(items):
        result.setdefault(item.node, []).append((place, item))
    return result
