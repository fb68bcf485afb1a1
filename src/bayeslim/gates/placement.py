"""The placement of gates: the axes of parameters that each of them scales.

    layer            side              one gate for each                 scales
    Linear           inputs            input                             a column of the weight
    convolution      outputs           filter                            its weights and its bias
    norm             outputs           channel                           its scale and its shift
    LSTM, GRU, RNN   inputs            input                             a column of weight_ih
                     hidden            hidden unit                       a column of weight_hh
                     preactivations    row of the layer's weights        a row of weight_ih and weight_hh; biases stay
    attention        inputs            input                             a column of the input projections
                     heads             head                              its columns of the output projection

are gated by default; `gate_at` also knows the outputs of Linear, the inputs of convolutions, and the rows (words) and
outputs (columns) of embeddings. With its gate at zero a unit is exactly zero, so that it can be removed exactly. A norm
undoes a scale in front of it. So if the next layer of a convolution, in the order of the model's modules, is a norm
over its channels, the gates of the convolution stand at that norm.

The outputs of the last layer are the outputs of the network and are never gated. The inputs of the first layer are: a
closed gate there means that the network does not need the input.

Recurrent layers after Chirkova, Lobacheva & Vetrov 2018, arXiv:1810.10927
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from bayeslim.errors import NoSiteMatched, UnsupportedModel, closest
from bayeslim.sites import is_norm

GateAt: TypeAlias = Mapping[str, str | Sequence[str]]
"""Sides to gate, by the name of a layer or a regular expression that matches the whole of it."""


@dataclass(frozen=True)
class Part:
    """An axis that gates scale: a parameter's name and a dimension of it."""

    parameter: str
    dim: int


@dataclass(frozen=True)
class Place:
    """The place of the gates of one side of a layer.

    Attributes:
        layer: the layer's name; it holds the gates' parameters.
        side: which side of it, such as "inputs".
        tag: its name among the gates of the layer: the side, with the number of a recurrent layer.
        parts: the axes that are scaled. One gate scales the same positions of all parts.
        count: the number of gates.
        width: the number of neighbouring positions of an axis that share a gate, such as the columns of a head.
        weights: the number of weights that go with a gate: those that it scales, and those on its other side (see
            `_Layers.weights_of_gates`).
    """

    layer: str
    side: str
    tag: str
    parts: tuple[Part, ...]
    count: int
    width: int = 1
    weights: float = 1.0

    @property
    def name(self) -> str:
        """The layer's name and the tag, unique in a model."""
        return f"{self.layer}.{self.tag}" if self.layer else self.tag

    def parameter(self, own: str) -> str:
        """Name one of the gates' own parameters, such as `fc1.inputs_gate_log_std`."""
        return f"{self.name}_gate_{own}"

    def along(self, values: Tensor, part: Part, ndim: int) -> Tensor:
        """Shape values of the gates, (..., count), to multiply a part's parameter."""
        values = self.widened(values)
        trailing = ndim - part.dim - 1
        return values.view(*values.shape[:-1], *[1] * part.dim, values.shape[-1], *[1] * trailing)

    def widened(self, values: Tensor) -> Tensor:
        """Repeat values of the gates for every position, (..., count · width)."""
        return values if self.width == 1 else values.repeat_interleave(self.width, dim=-1)

    def gathered(self, values: Tensor, part: Part) -> Tensor:
        """Group a parameter's entries by gate, (count, ...)."""
        return values.movedim(part.dim, 0).reshape(self.count, -1)


def place_gates(model: nn.Module, sites: Iterable[str], gate_at: GateAt | None = None) -> tuple[Place, ...]:
    """Find the places of gates.

    Args:
        model: the network.
        sites: the names of its random parameters. Unless `gate_at` is given, only their layers get gates.
        gate_at: layers and their sides, instead of those above, such as {"conv1": "outputs", "fc.*": "inputs"}.

    Raises:
        NoSiteMatched: if a layer or side does not exist, or there is nothing to gate.
        UnsupportedModel: if a side cannot be gated.
    """
    layers = _Layers(model)
    chosen = layers.usual(set(sites)) if gate_at is None else layers.asked(gate_at)
    places: list[Place] = []
    taken: set[Part] = set()
    for place in chosen:
        # Tied weights are one parameter, which is scaled once.
        parts = tuple(part for part in place.parts if part not in taken)
        taken.update(parts)
        if parts:
            places.append(replace(place, parts=parts))
    if not places:
        raise NoSiteMatched(
            f"{type(model).__name__} has no layer to gate: gates stand at trainable Linear, convolutional, recurrent "
            "and attention layers with random weights. Pass gate_at={name: side}, or leave gates out."
        )
    return tuple(places)


class _Layers:
    """The layers of a model, and the sides of each that can be gated."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        inside = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
        self.modules = {path: m for path, m in model.named_modules() if id(m) not in inside}
        leaves = [path for path, m in self.modules.items() if not any(True for _ in m.children())]
        self.following = dict(pairwise(leaves))
        self.weights = {path: found for path, m in self.modules.items() if (found := _count_weights(m))}
        """The number of weights of each layer that has any, in the order of the modules."""
        self.last = next(reversed(self.weights), "")

    def usual(self, sites: set[str]) -> Iterator[Place]:
        """Find the default places."""
        for path, module in self.modules.items():
            own = (self.names[p] for p in module.parameters() if p in self.names)
            if not _usual_sides(module) or not any(name in sites for name in own):
                continue
            for side in _usual_sides(module):
                if side == "outputs" and (path == self.last or self.hidden_by_norm(path)):
                    continue
                yield from (place for place in self.places(path, side) if self.trains(place))

    def asked(self, gate_at: GateAt) -> Iterator[Place]:
        """Find the places that `gate_at` names."""
        for key, sides in gate_at.items():
            try:
                pattern = re.compile(key)
            except re.error as error:
                raise NoSiteMatched(f'gate_at="{key}" is neither a name nor a regular expression: {error}.') from None
            found = [path for path in self.modules if path == key or (path and pattern.fullmatch(path))]
            gated = [path for path in found if _sides(self.modules[path])]
            if not gated:
                near = closest(key, self.modules) or ", ".join(f'"{p}"' for p in self.modules if p)
                what = "no layer" if not found else f"a {type(self.modules[found[0]]).__name__}, which has no sides"
                raise NoSiteMatched(f'gate_at="{key}" names {what}. Closest names: {near}.')
            for path in gated:
                for side in (sides,) if isinstance(sides, str) else sides:
                    yield from self.checked(path, side)

    def checked(self, path: str, side: str) -> list[Place]:
        """Find the places of a side that was asked for, or raise an error with the reason."""
        module = self.modules[path]
        shown = f'"{path}", a {type(module).__name__},'
        if side not in _sides(module):
            raise NoSiteMatched(f'{shown} has no side "{side}" to gate. It has {", ".join(_sides(module))}.')
        if side == "outputs" and path == self.last:
            raise UnsupportedModel(f"{shown} is the last layer, the network's own output: gate its inputs.")
        if side == "outputs" and self.hidden_by_norm(path):
            raise UnsupportedModel(
                f'{shown} feeds the norm "{self.following[path]}", which has no scale of its own and undoes every '
                "other. Give it one (affine=True), or gate the inputs of the layers behind it."
            )
        places = self.places(path, side)
        if not places:
            raise UnsupportedModel(
                f"The {side} of {shown} are no axis of its weight: it has groups, or its weight is computed."
            )
        frozen = next((place for place in places if not self.trains(place)), None)
        if frozen is not None:
            raise UnsupportedModel(
                f'"{frozen.parts[0].parameter}" is frozen (requires_grad=False), and its gates would be trained. Call '
                "requires_grad_(True) on it, or leave it out of gate_at."
            )
        return places

    def trains(self, place: Place) -> bool:
        return self.model.get_parameter(place.parts[0].parameter).requires_grad

    def norm_behind(self, path: str) -> str | None:
        """Find the norm over a layer's channels that directly follows it."""
        module, follower = self.modules[path], self.following.get(path)
        if follower is None or is_norm(module) or not is_norm(self.modules[follower]):
            return None
        channels = getattr(module, "out_channels", None) or getattr(module, "out_features", None)
        norm = self.modules[follower]
        sizes = [getattr(norm, key, None) for key in ("num_features", "num_channels", "normalized_shape")]
        return follower if channels in sizes or (channels,) in sizes else None

    def hidden_by_norm(self, path: str) -> bool:
        """Whether the next layer is a norm without a scale that a gate could multiply."""
        norm = self.norm_behind(path)
        return norm is not None and not self.places(norm, "outputs")

    def places(self, path: str, side: str) -> list[Place]:
        """Find the places of one side of a layer; for outputs, at the norm that follows."""
        norm = self.norm_behind(path) if side == "outputs" else None
        path = path if norm is None else norm
        module = self.modules[path]
        found = []
        for tag, axes, width in _axes(module, side):
            parts: list[Part] = []
            size = 0
            for leaf, dim in axes:
                tensor = _parameter(module, leaf)
                if tensor is not None and tensor in self.names:
                    parts.append(Part(self.names[tensor], dim))
                    size = tensor.shape[dim]
                elif not parts:  # without its weight the side has no axis
                    break
            if parts:
                count = size // width
                weights = self.weights_of_gates(path, side, parts) / count
                found.append(Place(path, side, tag, tuple(parts), count, width, weights))
        return found

    def weights_of_gates(self, path: str, side: str, parts: Sequence[Part]) -> int:
        """Count the weights that go if all gates of a side close.

        They are those that the gates scale, and those on their other side.

        Behind inputs stands the layer before, in the order of the model's modules, and behind outputs the one after; a
        norm is between both. Hidden units and heads are made by their own layer.
        """
        if side in ("hidden", "heads"):
            return self.weights[path]
        order = list(self.modules)
        here = order.index(path)
        before = [self.weights[p] for p in order[:here] if p in self.weights][-1:]
        after = [self.weights[p] for p in order[here + 1 :] if p in self.weights][:1]
        tensors = [self.model.get_parameter(part.parameter) for part in parts]
        scaled = sum(tensor.numel() for tensor in tensors if tensor.ndim > 1)
        others = {"inputs": before, "outputs": after}.get(side, [])
        return (scaled or sum(before)) + sum(others)


def _count_weights(module: nn.Module) -> int:
    """Count a layer's own weights; the output projection of attention is a part of it."""
    own = module.parameters(recurse=isinstance(module, nn.MultiheadAttention))
    return sum(tensor.numel() for tensor in own if tensor.ndim > 1)


def _parameter(module: nn.Module, leaf: str) -> nn.Parameter | None:
    path, _, own = leaf.rpartition(".")
    return module.get_submodule(path)._parameters.get(own)


_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def _usual_sides(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, nn.Linear):
        return ("inputs",)
    if isinstance(module, _ConvNd):
        return ("outputs",)
    return _sides(module) if isinstance(module, (*_RECURRENT, nn.MultiheadAttention)) else ()


def _sides(module: nn.Module) -> tuple[str, ...]:
    """List the sides of a layer that can be gated."""
    if isinstance(module, (nn.Linear, _ConvNd)):
        return ("inputs", "outputs")
    if isinstance(module, _RECURRENT):
        return ("inputs", "hidden", "preactivations")
    if isinstance(module, nn.MultiheadAttention):
        return ("inputs", "heads")
    if isinstance(module, _EMBEDDINGS):
        return ("rows", "outputs")
    return ("outputs",) if is_norm(module) else ()


_Axes: TypeAlias = tuple[str, list[tuple[str, int]], int]
"""A tag, axes as (parameter, dimension), and the number of positions that share a gate."""


def _axes(module: nn.Module, side: str) -> list[_Axes]:
    """List the axes of a side that are scaled together, the main weight first."""
    if isinstance(module, nn.MultiheadAttention):
        if side == "heads":
            return [("heads", [("out_proj.weight", 1)], module.head_dim)]
        if module._qkv_same_embed_dim:
            return [("inputs", [("in_proj_weight", 1)], 1)]
        return [(f"inputs_{one}", [(f"{one}_proj_weight", 1)], 1) for one in "qkv"]
    if isinstance(module, _RECURRENT):
        return _recurrent_axes(module, side)
    if isinstance(module, _EMBEDDINGS):
        return [(side, [("weight", 0 if side == "rows" else 1)], 1)]
    if is_norm(module):
        weight = module._parameters.get("weight")
        return [(side, [("weight", 0), ("bias", 0)], 1)] if weight is not None and weight.ndim == 1 else []
    produces = 1 if isinstance(module, _ConvTransposeNd) else 0
    reads = 1 - produces
    if isinstance(module, _ConvNd) and module.groups > 1 and (side == "inputs" or produces == 1):
        return []
    if side == "inputs":
        return [(side, [("weight", reads)], 1)]
    return [(side, [("weight", produces), ("bias", 0)], 1)]


def _recurrent_axes(module: nn.Module, side: str) -> list[_Axes]:
    """List the axes of a recurrent layer.

    A cell has one layer; others have several, each in one or two directions that read the same inputs.
    """
    if isinstance(module, nn.RNNBase):
        numbers = [f"_l{layer}" for layer in range(module.num_layers)]
        directions = ("", "_reverse") if module.bidirectional else ("",)
    else:
        numbers, directions = [""], ("",)
    if side == "inputs":
        return [(f"inputs{n}", [(f"weight_ih{n}{d}", 1) for d in directions], 1) for n in numbers]
    each = [f"{n}{d}" for n in numbers for d in directions]
    if side == "hidden":
        return [(f"hidden{one}", [(f"weight_hh{one}", 1)], 1) for one in each]
    return [(f"preactivations{one}", [(f"weight_ih{one}", 0), (f"weight_hh{one}", 0)], 1) for one in each]
