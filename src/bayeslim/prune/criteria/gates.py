"""The scores of gates, in the scale of the gate's paper (see the files of `bayeslim.gates`).

    weight  the lowest score of its gates: it goes when any of them closes
    unit    min(lowest score of the gates at its output, highest score of the gates of the layers that read it): it goes
            when the gate at its output closes, or when all layers that read it close theirs

A weight or unit without a gate has an infinite score and stays.

Louizos, Ullrich & Welling 2017, arXiv:1705.08665 · Louizos, Welling & Kingma 2018, arXiv:1712.01312
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayeslim.posteriors import Gated, Posterior, Scales
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.prune.criteria.base import Criterion, register_criterion
from bayeslim.types import Params

READING = ("inputs", "hidden", "heads")
"""The sides at which a layer reads units; at "outputs" it makes them."""


def gates(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """Score weights by the lowest score of their gates; infinite where there is none."""
    gated = _gated(posterior)
    found = {name: torch.full_like(mean, torch.inf, dtype=torch.float64) for name, mean in gated.mean.items()}
    for scales in gated.scales:
        for part in scales.place.parts:
            scores = found[part.parameter]
            own = scales.place.along(_scores(scales), part, scores.ndim)
            found[part.parameter] = torch.minimum(scores, own.to(scores.device))
    return found


def unit_gates(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """Score units by the gates all of whose weights go with the unit."""
    gated = _gated(posterior)
    made = torch.full((len(groups),), torch.inf, dtype=torch.float64)
    read = torch.full((len(groups),), -torch.inf, dtype=torch.float64)
    for scales in gated.scales:
        if scales.place.side not in (*READING, "outputs"):
            continue
        scores, numbers = _scores(scales).cpu(), _numbers(scales, gated)
        for place, group in enumerate(groups):
            inside = scores[_whole(scales, numbers, group)]
            if not len(inside):
                continue
            if scales.place.side == "outputs":
                made[place] = min(made[place], inside.min())
            else:
                read[place] = max(read[place], inside.max())
    return torch.minimum(made, torch.where(read == -torch.inf, torch.inf, read))


def _scores(scales: Scales) -> Tensor:
    """Score gates; finite, to tell a unit whose gates are cut from one that has none."""
    lowest = torch.finfo(torch.float64).min
    return scales.gate.score(scales.own).double().clamp(min=lowest).masked_fill(scales.cut, lowest)


def _numbers(scales: Scales, gated: Gated) -> Params:
    """Return the index of the gate of every weight, flat, by parameter."""
    place, found = scales.place, {}
    for part in place.parts:
        shape = gated.mean[part.parameter].shape
        found[part.parameter] = place.along(torch.arange(place.count), part, len(shape)).expand(shape).flatten()
    return found


def _whole(scales: Scales, numbers: Params, group: Group) -> Tensor:
    """Find the gates that have all their weights in a group, (count,)."""
    whole = torch.ones(scales.place.count, dtype=torch.bool)
    for name, number in numbers.items():
        if name not in group:
            return torch.zeros_like(whole)
        count = number[group[name].cpu()].bincount(minlength=scales.place.count)
        whole &= count == len(number) // scales.place.count
    return whole


def _gated(posterior: Posterior) -> Gated:
    if not isinstance(posterior, Gated):
        raise TypeError(
            f'criterion="gates" ranks by gates, and a {type(posterior).__name__} posterior has none. Use '
            'bl.Variational(gates=...), or another criterion, such as "snr".'
        )
    return posterior


GATES = register_criterion(Criterion("gates", gates, unit_gates))
