"""Units in the order that a file needs the fewest bits for.

Hidden units of a layer may change places without changing what a network says: n of them are n! networks that are one
and the same. A file need not say which of these it holds, which is worth log2 n! bits a layer. Units that are sorted by
how many entries they read, and by where the first is, make most of that real: a count is at most the one before.
"""

from __future__ import annotations

import copy

from torch import nn

from bayeslim.compact import units
from bayeslim.compact.alike import Alike, Axis, alike
from bayeslim.compact.proof import Reference
from bayeslim.compact.trace import evaluating_copy, tensors_of
from bayeslim.types import Inputs, Params


def sort_units(network: nn.Module, example: Inputs) -> nn.Module:
    """A network that gives the same answers, its hidden units sorted.

    Layers whose units cannot change places, by a check on inputs like the example, stay as they are.

    Args:
        network: a plain network, which is not changed.
        example: inputs on which to trace and check it.

    Raises:
        UnsupportedModel: if the network cannot be traced.
    """
    reference = Reference(evaluating_copy(network), example, 1e-6)
    found = copy.deepcopy(network)
    tensors = {name: tensor.detach() for name, tensor in tensors_of(found).items()}
    for members in alike(units(found, example)):
        before = {name: tensors[name].clone() for name, _ in members.places}
        reads = _reads(members, tensors)
        members.permute_(tensors, sorted(range(len(members)), key=reads.__getitem__))
        if not reference.compare(evaluating_copy(found)).holds:
            for name, tensor in before.items():
                tensors[name].copy_(tensor)
    return found


def _reads(members: Alike, tensors: Params) -> list[tuple[int, ...]]:
    """A key for each unit: those that read much come first; of equals, the one whose first entry is first."""
    rows = next((axis for axis in members.places if axis in members.made and _is_rows(axis, tensors)), None)
    if rows is None:
        return [()] * len(members)
    weight, places = tensors[rows[0]], members.places[rows]
    columns = [weight[own.to(weight.device)].flatten(1).nonzero()[:, 1].tolist() for own in places]
    return [(-len(own), *own) for own in columns]


def _is_rows(axis: Axis, tensors: Params) -> bool:
    name, dim = axis
    return dim == 0 and tensors[name].ndim > 1
