"""Units as candidates: a cut unit takes the rows that make it and the columns that read it with it.

The units are those that compaction can remove, so that a cut by units gives a smaller network.

A unit is lost once, and a posterior that is linear in the weights would count it twice: its output is a product of the
weights that make it and those that read it, and setting both to zero changes a linearised network by twice the unit.
So the posterior is conditioned on the zeros of the weights that read the unit. The weights that make it are `unread`
from then on: they are set to zero, and no other weight compensates for them. (Only where no reader has a posterior, it
is conditioned on the zeros of the weights that make the unit.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayeslim.compact import Unit, UnitGraph
from bayeslim.errors import BayeslimError
from bayeslim.posteriors.saliency import Group
from bayeslim.prune.candidates import Candidates, Pruning, checked
from bayeslim.prune.criteria.magnitude import unit_magnitude
from bayeslim.prune.settings import Settings
from bayeslim.sites import is_weight
from bayeslim.types import Params

_UNPARAMETRIZE = (
    " Units of weights that a parametrization computes stay: train with it, then make them plain weights with "
    'torch.nn.utils.parametrize.remove_parametrizations(layer, "weight") before bayesianize.'
)


def unit_candidates(pruning: Pruning, settings: Settings) -> Candidates:
    """List every removable unit, scored by the joint posterior of its weights."""
    if pruning.criterion.units is None:
        raise ValueError(
            f'criterion="{pruning.criterion.name}" ranks single weights only. For units use "curvature", "density", '
            '"savage_dickey", "snr" or "magnitude", or pass a Criterion that can score units.'
        )
    graph = settings.units_of(pruning.bnn)
    left = {f"{f.parameter}, dimension {f.dim}": f"{f.count} stay: {f.reason}" for f in graph.frozen}
    random = set(pruning.posterior.names)
    groups = _groups(graph, random)
    protected = pruning.protected()
    places: list[int] = []
    for place, unit in enumerate(graph.units):
        if any(part.parameter in protected for part in unit.incoming):
            left[unit.layer] = "protected"
        elif not groups[place]:
            left[unit.layer] = "its units have no posterior: they were trained as points"
        else:
            places.append(place)
    if not places:
        reasons = "; ".join(f"{name}: {why}" for name, why in left.items()) or "it has no hidden units"
        advice = _UNPARAMETRIZE if any("parametrizations." in name for name in left) else ""
        raise BayeslimError(f"No unit of {pruning.bnn.sites.model} can be cut: {reasons}.{advice}")
    chosen = [groups[place] for place in places]
    layers = list(dict.fromkeys(graph.units[place].layer for place in places))
    start = {name: pruning.kept(name) for name in graph.shapes}

    def masks(cut: Tensor) -> Params:
        cut_masks = graph.masks([places[item] for item in cut.tolist()])
        return {name: mask & start[name] for name, mask in cut_masks.items()}

    def unread(cut: Tensor) -> Params:
        chosen = [graph.units[places[item]] for item in cut.tolist()]
        made = [part for unit in chosen if any(p.parameter in random for p in unit.outgoing) for part in unit.incoming]
        lines: dict[tuple[str, int], list[int]] = {}
        for part in made:
            lines.setdefault((part.parameter, part.dim), []).extend(part.indices)
        silent: Params = {}
        for (name, dim), indices in lines.items():
            mask = silent.setdefault(name, torch.zeros(graph.shapes[name], dtype=torch.bool))
            mask.index_fill_(dim, torch.tensor(indices), True)
        return silent

    scores = pruning.criterion.units(pruning.posterior, pruning.bnn.priors, chosen)
    if scores.shape != (len(chosen),):
        raise BayeslimError(
            f"A criterion gives one score a unit, {len(chosen)}. {pruning.criterion.name} gave {tuple(scores.shape)}."
        )
    return Candidates(
        scores=checked(scores.double().cpu(), "the units", pruning.criterion.name),
        ties=unit_magnitude(pruning.posterior, pruning.bnn.priors, chosen).double().cpu(),
        sizes=torch.tensor([sum(len(index) for index in group.values()) for group in chosen]),
        layers=torch.tensor([layers.index(graph.units[place].layer) for place in places]),
        layer_names=tuple(layers),
        gone=torch.tensor([_is_gone(graph.units[place], start) for place in places]),
        masks=masks,
        weights=tuple(
            name for name, p, module in pruning.parameters() if is_weight(name, p, module) and name not in protected
        ),
        left=left,
        unread=unread,
        graph=graph,
        units=tuple(places),
    )


def _groups(graph: UnitGraph, random: set[str]) -> list[Group]:
    """Find the flat indices of every unit's weights that have a posterior."""
    numbered = {name: torch.arange(torch.Size(shape).numel()).view(shape) for name, shape in graph.shapes.items()}
    groups: list[Group] = []
    for unit in graph.units:
        parts: dict[str, list[Tensor]] = {}
        for part in (*unit.incoming, *unit.outgoing):
            if part.parameter in random:
                indices = numbered[part.parameter].index_select(part.dim, torch.tensor(part.indices)).flatten()
                parts.setdefault(part.parameter, []).append(indices)
        groups.append({name: own[0] if len(own) == 1 else torch.cat(own).unique() for name, own in parts.items()})
    return groups


def _is_gone(unit: Unit, start: Params) -> bool:
    return not any(
        bool(start[part.parameter].index_select(part.dim, torch.tensor(part.indices)).any()) for part in unit.incoming
    )
