"""The removable units of a network: neurons, channels, heads, recurrent units.

A unit is a set of channels that must go together: with it go the parameter slices that *produce* it (rows of weights,
biases, the parameters of norms) and those that *read* it (columns of the weights that follow). Any set of units can
be cut as long as one is left in every layer: every tensor of the network stays rectangular. Channels that cannot be
removed are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bayeslim.compact import attention, contraction  # noqa: F401  (registers the rules)
from bayeslim.compact.adapters import has_adapters, rank_weights
from bayeslim.compact.channels import Channels
from bayeslim.compact.labels import slim
from bayeslim.compact.shapes import Shrinking
from bayeslim.compact.trace import trace
from bayeslim.types import Inputs

_KINDS = ("neuron", "channel", "recurrent unit", "head")
_FITS_BASE = "the adapter has to fit its base network (to cut that too, call merge_and_unload() first)"


@dataclass(frozen=True)
class Slice:
    """Some indices along one dimension of a parameter."""

    parameter: str
    dim: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Channels that are removed together.

    Attributes:
        layer: the module that first produces it.
        kind: "neuron", "channel", "head" or "recurrent unit".
        incoming: the slices that produce it: rows, biases, norms.
        outgoing: the slices that read it: columns.
    """

    layer: str
    kind: str
    incoming: tuple[Slice, ...]
    outgoing: tuple[Slice, ...]


@dataclass(frozen=True)
class Frozen:
    """Channels of a parameter that cannot be removed, and the reason."""

    parameter: str
    dim: int
    count: int
    reason: str


@dataclass(frozen=True, repr=False)
class UnitGraph:
    """The units of a network, and the channels that have to stay.

    Attributes:
        units: all removable units, in the order of the network.
        frozen: the channels that cannot be removed, with the reason.
        shapes: the shape of every parameter.
        contracted: the weights of matrix products and convolutions.
    """

    units: tuple[Unit, ...]
    frozen: tuple[Frozen, ...]
    shapes: dict[str, tuple[int, ...]]
    contracted: frozenset[str]
    structure: Structure = field(compare=False)

    def masks(self, cut: Iterable[int]) -> dict[str, Tensor]:
        """Make masks (True = kept) by parameter name that cut units.

        Args:
            cut: indices into `units`.
        """
        masks = {name: torch.ones(shape, dtype=torch.bool) for name, shape in self.shapes.items()}
        lines: dict[tuple[str, int], list[int]] = {}
        for place in cut:
            for part in (*self.units[place].incoming, *self.units[place].outgoing):
                lines.setdefault((part.parameter, part.dim), []).extend(part.indices)
        for (name, dim), indices in lines.items():
            masks[name].index_fill_(dim, torch.tensor(indices), False)
        return masks

    def by_layer(self) -> dict[str, list[int]]:
        """Group the indices into `units` by the layer that produces them."""
        layers: dict[str, list[int]] = {}
        for place, unit in enumerate(self.units):
            layers.setdefault(unit.layer, []).append(place)
        return layers

    def __repr__(self) -> str:
        lines = [f"UnitGraph: {len(self.units)} removable units"]
        for layer, places in self.by_layer().items():
            kind = self.units[places[0]].kind
            lines.append(f"  {layer or '(root)'}: {len(places)} {kind}{'s' if len(places) > 1 else ''}")
        lines += [f"  {e.parameter}, dimension {e.dim}: {e.count} stay, because {e.reason}" for e in self.frozen]
        return "\n".join(lines)


@dataclass(frozen=True)
class Structure:
    """The labelled channels of a network, and the representative label of each unit."""

    channels: Channels
    roots: Tensor

    @property
    def size(self) -> int:
        """The number of labels."""
        return self.channels.labels.count


def units(model: nn.Module, example: Inputs) -> UnitGraph:
    """Find the removable units of a network.

    Args:
        model: any network that `torch.export` can trace. It is not changed.
        example: inputs: a tensor, a tuple of arguments or a dict.

    Raises:
        ShapeMismatch: if the network does not run on the example.
        UnsupportedModel: if it cannot be traced.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> found = units(net, torch.zeros(1, 4))
    >>> found.units[1].incoming
    (Slice(parameter='0.weight', dim=0, indices=(1,)), Slice(parameter='0.bias', dim=0, indices=(1,)))
    >>> found.units[1].outgoing
    (Slice(parameter='2.weight', dim=1, indices=(1,)),)
    """
    channels = Channels(trace(model, example))
    if has_adapters(model):
        ranks = rank_weights(model)
        for name, _, labels, _ in sliced_axes(channels):
            if name not in ranks:
                channels.labels.freeze(channels.labels.find(labels), _FITS_BASE)
    _try_removal(channels)
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
    frozen = channels.labels.frozen()
    incoming: dict[int, list[Slice]] = {}
    outgoing: dict[int, list[Slice]] = {}
    stay: list[Frozen] = []
    for name, dim, labels, roles in sliced_axes(channels):
        if name not in parameters:
            continue
        reasons: dict[str, int] = {}
        for root, indices in _by_root(channels.labels.find(labels)).items():
            if root in frozen:
                reasons[frozen[root]] = reasons.get(frozen[root], 0) + len(indices)
            else:
                part = Slice(name, dim, indices)
                for role, slices in (("produces", incoming), ("reads", outgoing)):
                    if role in roles:
                        slices.setdefault(root, []).append(part)
        if "produces" in roles and len(parameters[name]) > 1:
            stay += [Frozen(name, dim, count, reason) for reason, count in reasons.items()]
    kinds = _kinds(channels)
    order = {name: place for place, name in enumerate(parameters)}
    roots = sorted(
        incoming, key=lambda root: (min(order[s.parameter] for s in incoming[root]), incoming[root][0].indices[0])
    )
    found = tuple(
        Unit(
            layer=incoming[root][0].parameter.rpartition(".")[0],
            kind=kinds.get(root, "channel"),
            incoming=tuple(incoming[root]),
            outgoing=tuple(outgoing.get(root, ())),
        )
        for root in roots
    )
    contracted = frozenset(each.weight for each in channels.contractions)
    structure = Structure(channels, torch.tensor(roots, dtype=torch.int64))
    return UnitGraph(found, tuple(stay), parameters, contracted, structure)


def sliced_axes(channels: Channels) -> list[tuple[str, int, Tensor, set[str]]]:
    """List the axes that channels run along: name, dimension, labels, roles."""
    found = [(name, dim, axis.labels, axis.roles) for (name, dim), axis in channels.axes.items()]
    for name, labels in channels.elements.items():
        for dim, size in enumerate(slim(channels.labels.find(labels)).shape):
            if size > 1:
                line = channels.labels.find(labels).movedim(dim, 0).reshape(labels.shape[dim], -1)[:, 0]
                found.append((name, dim, line, {"produces"}))
    return found


def restore_empty(channels: Channels, gone: Tensor) -> Tensor:
    """Bring classes back until no tensor is empty; return their mask."""
    lines = [channels.labels.find(labels) for _, _, labels, _ in sliced_axes(channels)]
    for labels in channels.of.values():
        parts = labels if isinstance(labels, list) else [labels]
        lines += [slim(channels.labels.find(part)).reshape(-1) for part in parts if part is not None and part.numel()]
    back = torch.zeros_like(gone)
    changed = True
    while changed:
        changed = False
        for line in lines:
            if bool((gone & ~back)[line].all()):
                back[line[0]] = changed = True
    return back


def _try_removal(channels: Channels) -> None:
    """Freeze classes that an operation cannot lose, by removing random halves."""
    generator = torch.Generator().manual_seed(0)
    passes = 0
    while passes < 2:
        gone = torch.rand(channels.labels.count, generator=generator) < 0.5
        gone[torch.tensor(list(channels.labels.frozen()), dtype=torch.int64)] = False
        gone &= ~restore_empty(channels, gone)
        blocked = Shrinking(channels, gone).illegal()
        passes = 0 if blocked else passes + 1
        for node in blocked:
            for tensor in (node, *node.all_input_nodes):
                labels = channels.of.get(tensor)
                for part in labels if isinstance(labels, list) else [labels]:
                    if part is not None:
                        channels.labels.freeze(channels.labels.find(part), f"{node.name} cannot work on fewer channels")


def _by_root(roots: Tensor) -> dict[int, tuple[int, ...]]:
    places: dict[int, list[int]] = {}
    for place, root in enumerate(roots.tolist()):
        places.setdefault(root, []).append(place)
    return {root: tuple(indices) for root, indices in places.items()}


def _kinds(channels: Channels) -> dict[int, str]:
    result: dict[int, str] = {}
    for rank in _KINDS:
        for kind, labels in channels.kinds:
            if kind == rank:
                result.update(dict.fromkeys(torch.unique(slim(channels.labels.find(labels))).tolist(), kind))
    return result
