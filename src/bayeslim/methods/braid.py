"""Braids: S networks that are graphs of linear layers, called on the same inputs at once.

As `chain` calls rows of layers, for networks whose values part and come together again: residual ones, and those with
several heads. The first product on inputs is one for all networks; from there on values are (S, B, features), and every
layer is one product for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeslim.fused import SAME
from bayeslim.graphs import Graph
from bayeslim.methods.chain import ELEMENTWISE, IN_PLACE, Chain, adds_later, chain_of, features_differ, fits
from bayeslim.methods.tables import Table, joined_by
from bayeslim.stochastic import plain_type
from bayeslim.types import Params

Function = Callable[[Tensor], Tensor]

_WITH_WEIGHTS = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, eq=False)
class Braid:
    """S networks, ready for inputs.

    Attributes:
        model: their architecture, unrolled.
        layers: what it is made of.
        stack: the parameters of all networks.
        first: gives what is the same for all networks.
        rest: gives the outputs for that.
        weight: of the first layer, (S, *shape).
        own: the model's own parameters there.
        lasts: whether all of it are views of the stack, so that whoever has that may keep it.
    """

    model: nn.Module
    layers: tuple[nn.Module | None, ...]
    stack: list[Tensor]
    first: Callable[[Tensor], tuple[Any, ...]]
    rest: Callable[..., Tensor]
    weight: Tensor
    own: Mapping[str, Any]
    lasts = True

    def is_of(self, model: nn.Module, stack: Params) -> bool:
        """Whether a model and a stack would make the same now."""
        return (
            self.model is model
            and self.layers == tuple(model._modules.values())
            and len(self.stack) == len(stack)
            and all(map(is_, self.stack, stack.values()))
            and fits(self.weight, self.own["weight"])
        )

    def __call__(self, x: Tensor) -> Tensor | None:
        """The outputs, (S, B, ...); None for inputs that are no rows of features."""
        values = self.first(x)
        if any(not isinstance(value, Tensor) or value.ndim != 2 for value in values):
            return None
        outputs = self.rest(*values)
        return outputs if outputs.is_cpu else outputs.contiguous()


def at_once(model: nn.Module, stack: Params) -> Chain | Braid | None:
    """Networks ready to be called at once, if they can be: a row of layers, or a graph of them."""
    return braid_of(model, stack) if isinstance(model, Graph) else chain_of(model, stack) or braid_of(model, stack)


def braid_of(model: nn.Module, stack: Params) -> Braid | None:
    """The braid that networks are; None where a layer is not known, or something in the stack would not be read."""
    strands = _Strands(stack, {module: path for path, module in model.named_modules()})
    first: Callable[[Tensor], tuple[Any, ...]]
    rest: Callable[..., Tensor] | None
    if isinstance(model, Graph) and model.abreast is not None:
        every = {name: strands.part_of(model._modules[name]) for name in model.abreast}
        parts = SimpleNamespace(**{name: part for name, part in every.items() if part is not None})
        first, rest = partial(model.first, model), partial(model.rest, parts) if None not in every.values() else None
    elif type(model) is nn.Sequential:
        first, rest = _flat if type(next(iter(model), None)) is nn.Flatten else _alone, strands.part_of(model)
    else:
        return None
    if rest is None or strands.unread or strands.first is None:
        return None
    return Braid(model, tuple(model._modules.values()), list(stack.values()), first, rest, *strands.first)


class _Strands:
    """Layers of all networks.

    Args:
        stack: the parameters of all networks.
        paths: of layers in the model.
    """

    def __init__(self, stack: Params, paths: dict[nn.Module, str]):
        self.stack, self.paths = stack, paths
        self.unread = set(stack)
        self.first: tuple[Tensor, Mapping[str, Any]] | None = None

    def part_of(self, part: Any) -> Function | None:
        """A layer, or a row of layers, of all networks; None if one is not known."""
        layers = list(part._modules.values()) if type(part) is nn.Sequential else [part]
        steps: list[Function] = []
        fresh = False  # whether nobody else reads what a step is given
        rest = iter(layers)
        for layer in rest:
            if plain_type(layer) is nn.Embedding:
                step = self._table(layer, joined_by(next(rest, None)))
            elif plain_type(layer) is nn.EmbeddingBag:
                step = self._table(layer, layer.mode if layer.padding_idx is None else None)
            else:
                step = self._step_of(layer, fresh)
            if step is None:
                return None
            steps.append(step)
            fresh = fresh or plain_type(layer) in _WITH_WEIGHTS
        return steps[0] if len(steps) == 1 else partial(_run, steps)

    def _table(self, layer: Any, joined: str | None) -> Function | None:
        """Rows of a table, and how one is made of those at all positions."""
        own = layer._parameters
        table = self._of_all(f"{self.paths[layer]}.weight", own.get("weight"))
        if table is None or table.is_inference() or joined is None or layer.max_norm is not None:
            return None
        self.first = self.first or (table, own)
        return Table(table, joined)

    def _step_of(self, layer: Any, fresh: bool) -> Function | None:
        kind = plain_type(layer)
        if kind in SAME or (kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)):
            return _same  # rows of features are flat
        if kind in ELEMENTWISE:
            return cast(Function, IN_PLACE.get(kind, layer) if fresh else layer)
        if kind not in (nn.Linear, nn.LayerNorm):
            return None
        own = layer._parameters
        if not {"weight", "bias"} <= own.keys():
            return None
        weight, bias = (self._of_all(f"{self.paths[layer]}.{leaf}", own[leaf]) for leaf in ("weight", "bias"))
        if (weight is None) != (own["weight"] is None) or (bias is None) != (own["bias"] is None):
            return None
        if kind is nn.LayerNorm:
            return partial(_normed, weight, bias, layer) if len(layer.normalized_shape) == 1 else None
        assert weight is not None
        self.first = self.first or (weight, own)
        return partial(_product, weight, weight.mT, None if bias is None else bias.unsqueeze(1))

    def _of_all(self, path: str, own: Tensor | None) -> Tensor | None:
        """A tensor of every network, (S, *shape), if there is one that fits the model's own."""
        values = self.stack.get(path)
        if own is None or values is None or not fits(values, own) or not values.is_contiguous():
            return None
        self.unread.discard(path)
        return values


def _same(x: Tensor) -> Tensor:
    return x


def _run(steps: Iterable[Function], x: Tensor) -> Tensor:
    for step in steps:
        x = step(x)
    return x


def _product(weight: Tensor, turned: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Of each network on its own values, (S, B, features), or of all on the same, (B, features)."""
    if x.ndim == 2:
        if x.shape[1] != weight.shape[2]:
            raise features_differ(weight.shape[2], x)
        rows = F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
        return rows.view(len(x), len(weight), -1).transpose(0, 1)
    if bias is None:
        return torch.bmm(x, turned)
    return torch.bmm(x, turned).add_(bias) if adds_later(x) else torch.baddbmm(bias, x, turned)


def _normed(weight: Tensor | None, bias: Tensor | None, norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """A layer norm, with what each network scales and shifts by."""
    x = F.layer_norm(x, norm.normalized_shape, None, None, norm.eps)
    if weight is not None:
        x = x * weight.unsqueeze(1) if x.ndim == 2 else x.mul_(weight.unsqueeze(1))
    if bias is not None:
        x = x + bias.unsqueeze(1) if x.ndim == 2 else x.add_(bias.unsqueeze(1))
    return x


def _alone(x: Tensor) -> tuple[Tensor]:
    return (x,)


def _flat(x: Tensor) -> tuple[Tensor]:
    return (x.flatten(1),)
