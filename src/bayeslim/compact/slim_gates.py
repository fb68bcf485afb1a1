"""The gates of a compacted network.

Compaction cuts the mean network, whose weights are scaled already, w = E[z] w̃. The smaller Bayesian network has the old
gates of the kept units and the old w̃. A constant that compaction added to a bias is divided by its gate first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.compact.restricted import Kept, NotRestrictable
from bayeslim.compact.surgery import sliced
from bayeslim.gates import Gate
from bayeslim.gates.placement import Place
from bayeslim.methods.shared.gating import Gating


def gate_parameters(bnn: Bayesian) -> set[str]:
    """Return the names of the parameters of a network's gates."""
    names = bnn.state.get("gate_names", ())
    return {place.parameter(own) for place in bnn.state.get("places", ()) for own in names}


def copy_gates(bnn: Bayesian, found: Bayesian, gate: Gate, kept: Kept, moved: Mapping[str, Tensor]) -> None:
    """Copy the gates that stay, and the weights that they scale.

    Args:
        bnn: the whole network.
        found: the smaller one, with the scaled weights and initial gates.
        gate: the kind of gates.
        kept: the indices that stay.
        moved: the constants that compaction added to the scaled parameters of the smaller network.
    """
    smaller = {place.name: place for place in found.state["places"]}
    old, new = Gating(gate, bnn), Gating(gate, found)
    if {place.name for place in old.places} != smaller.keys():
        raise NotRestrictable(_ELSEWHERE)
    with torch.no_grad():
        for place in old.places:
            numbers = _numbers(place, kept)
            if len(numbers) != smaller[place.name].count:
                raise NotRestrictable(_ELSEWHERE)
            target = new.own(smaller[place.name])
            for name, value in gate.pick(old.own(place), numbers).items():
                target[name].copy_(value)
        scaled = {name: bnn.model.get_parameter(name) for name in old.parameters}
        factors = old.mean_params({name: torch.ones_like(value) for name, value in scaled.items()})
        for name, value in scaled.items():
            own, extra = kept.get(name, {}), moved[name]
            before = sliced(value.detach(), own)
            found.model.get_parameter(name).copy_(
                torch.where(extra == 0, before, before + extra / sliced(factors[name], own))
            )


def _numbers(place: Place, kept: Kept) -> Tensor:
    """Return the indices of the gates that stay."""
    part = place.parts[0]
    left = kept.get(part.parameter, {}).get(part.dim)
    if left is None:
        return torch.arange(place.count)
    numbers: Tensor = (left // place.width).unique()
    if len(numbers) * place.width != len(left):
        raise NotRestrictable(_ELSEWHERE)
    return numbers.cpu()


_ELSEWHERE = (
    "The gates of the compacted network are at other layers than those of the whole. Compact the plain network "
    "instead: compact(network, example)."
)
