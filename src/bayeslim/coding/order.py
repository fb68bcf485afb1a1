"""The order of hidden units that takes the fewest bits.

Permuting the n hidden units of a layer does not change the network's answers, so n! networks are equivalent and a file
may hold any of them. That is worth log2 n! bits per layer. Sorting units by the number of entries that they read, and
then by their first entry, saves most of it: each count is at most the one before.
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
    """Sort the hidden units of a copy of the network; its answers stay the same.

    Layers whose units cannot be permuted, by a check on inputs like the example, stay as they are.

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
    """Compute a sort key per unit: more entries first, then the earlier first one."""
    rows = next((axis for axis in members.places if axis in members.made and _is_rows(axis, tensors)), None)
    if rows is None:
        return [()] * len(members)
    weight, places = tensors[rows[0]], members.places[rows]
    columns = [weight[own.to(weight.device)].flatten(1).nonzero()[:, 1].tolist() for own in places]
    return [(-len(own), *own) for own in columns]


def _is_rows(axis: Axis, tensors: Params) -> bool:
    name, dim = axis
    return dim == 0 and tensors[name].ndim > 1
