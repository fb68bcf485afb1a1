"""Units in the order that a file needs the fewest bits for.

Hidden units of a layer may change places without changing what a network says: n of them are n! networks that are one
and the same. A file need not say which of these it holds, which is worth log2 n! bits a layer. Units that are sorted by
how many entries they read, and by where the first is, make most of that real: a count is at most the one before.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from bayeslim.compact import Slice, Unit, units
from bayeslim.compact.proof import Reference
from bayeslim.compact.trace import evaluating_copy
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
    state = found.state_dict()
    groups = defaultdict[object, list[Unit]](list)
    for unit in units(found, example).units:
        kinds = tuple((part.parameter, part.dim, len(part.indices)) for part in _parts(unit))
        groups[kinds].append(unit)
    for members in groups.values():
        before = {part.parameter: state[part.parameter].clone() for part in _parts(members[0])}
        places = sorted(members, key=lambda unit: unit.incoming[0].indices)
        _permute_(state, places, sorted(places, key=lambda unit: _reads(unit, state)))
        if not reference.compare(evaluating_copy(found)).holds:
            for name, tensor in before.items():
                state[name].copy_(tensor)
    return found


def _permute_(state: Params, places: Sequence[Unit], members: Sequence[Unit]) -> None:
    """Put units into the places of others, in place."""
    for place, part in enumerate(_parts(places[0])):
        tensor = state[part.parameter]
        to, of = (
            torch.tensor([i for unit in some for i in _parts(unit)[place].indices], device=tensor.device)
            for some in (places, members)
        )
        tensor.index_copy_(part.dim, to, tensor.index_select(part.dim, of))


def _parts(unit: Unit) -> tuple[Slice, ...]:
    return (*unit.incoming, *unit.outgoing)


def _reads(unit: Unit, state: Params) -> tuple[int, ...]:
    """Units that read much come first; of those that read equally much, the one whose first entry is first."""
    rows = next((part for part in unit.incoming if part.dim == 0 and state[part.parameter].ndim > 1), None)
    if rows is None:
        return ()
    columns = state[rows.parameter][list(rows.indices)].flatten(1).nonzero()[:, 1].tolist()
    return (-len(columns), *columns)
