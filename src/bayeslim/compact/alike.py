"""Interchangeable units: permuting them does not change a network's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslim.compact.graph import UnitGraph, sliced_axes
from bayeslim.types import Params

Axis = tuple[str, int]
"""A dimension of a parameter or buffer, by its name."""


@dataclass(frozen=True)
class Alike:
    """Units that can be permuted.

    Attributes:
        places: the indices of each unit, (units, indices of one), for each dimension that the units run along, of
            parameters and of buffers such as the statistics of a batch norm.
        made: the dimensions along which the units are produced; along the others they are read.
    """

    places: dict[Axis, Tensor]
    made: frozenset[Axis]

    def __len__(self) -> int:
        return len(next(iter(self.places.values())))

    def permute_(self, tensors: Params, order: Sequence[int]) -> None:
        """Put unit `order[k]` where unit k is, in all tensors, in place."""
        for (name, dim), places in self.places.items():
            along = tensors[name].detach().movedim(dim, 0)
            places = places.to(along.device)
            along[places.flatten()] = along[places[order].flatten()].clone()


def alike(graph: UnitGraph) -> list[Alike]:
    """Group the units that can be permuted; leave out groups of one."""
    channels = graph.structure.channels
    roots = set(graph.structure.roots.tolist())
    places: dict[int, dict[Axis, list[int]]] = {root: {} for root in sorted(roots)}
    made = set()
    for name, dim, labels, roles in sliced_axes(channels):
        if "produces" in roles:
            made.add((name, dim))
        for place, root in enumerate(channels.labels.find(labels).tolist()):
            if root in roots:
                places[root].setdefault((name, dim), []).append(place)
    groups: dict[tuple[tuple[Axis, int], ...], list[dict[Axis, list[int]]]] = {}
    for own in places.values():
        groups.setdefault(tuple((axis, len(along)) for axis, along in own.items()), []).append(own)
    return [
        Alike(
            {axis: torch.tensor([own[axis] for own in members]) for axis, _ in kind},
            frozenset(made & dict(kind).keys()),
        )
        for kind, members in groups.items()
        if len(members) > 1
    ]
