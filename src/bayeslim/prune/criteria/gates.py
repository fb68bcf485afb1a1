"""The scores of gates, in the scale of the gate's paper (see the files of `bayeslim.gates`).

    weight  the lowest score of its gates: it goes when any of them closes
    unit    min(lowest score of the gates at its output, highest score of the gates of the layers that read it): it goes
            when the gate at its output closes, or when all layers that read it close theirs

A weight or unit without a gate has an infinite score and stays.

Louizos, Ullrich & Welling 2017, arXiv:1705.08665 · Louizos, Welling & Kingma 2018, arXiv:1712.01312
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    return score_weights(gated_posterior(posterior, "gates"), own_score)


def unit_gates(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """Score units by the gates all of whose weights go with the unit."""
    return score_units(gated_posterior(posterior, "gates"), groups, own_score)


def score_weights(gated: Gated, score: Callable[[Scales], Tensor]) -> Params:
    """Give every weight the lowest score of its gates; infinite where there is none."""
    found = {name: torch.full_like(mean, torch.inf, dtype=torch.float64) for name, mean in gated.mean.items()}
    for scales in gated.scales:
        for part in scales.place.parts:
            scores = found[part.parameter]
            own = scales.place.along(_finite(scales, score), part, scores.ndim)
            found[part.parameter] = torch.minimum(scores, own.to(scores.device))
    return found


def score_units(gated: Gated, groups: Sequence[Group], score: Callable[[Scales], Tensor]) -> Tensor:
    """Score units by the gates all of whose weights go with the unit."""
    made = torch.full((len(groups),), torch.inf, dtype=torch.float64)
    read = torch.full((len(groups),), -torch.inf, dtype=torch.float64)
    for scales in gated.scales:
        if scales.place.side not in (*READING, "outputs"):
            continue
        scores, numbers = _finite(scales, score).cpu(), _numbers(scales, gated)
        for place, group in enumerate(groups):
            inside = scores[_whole(scales, numbers, group)]
            if not len(inside):
                continue
            if scales.place.side == "outputs":
                made[place] = min(made[place], inside.min())
            else:
                read[place] = max(read[place], inside.max())
    return torch.minimum(made, torch.where(read == -torch.inf, torch.inf, read))


def own_score(scales: Scales) -> Tensor:
    """Score gates in the unit of their paper."""
    return scales.gate.score(scales.own)


def _finite(scales: Scales, score: Callable[[Scales], Tensor]) -> Tensor:
    """Score gates; finite, to tell a unit whose gates are cut from one that has none."""
    lowest = torch.finfo(torch.float64).min
    return score(scales).double().clamp(min=lowest).masked_fill(scales.cut, lowest)


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


def gated_posterior(posterior: Posterior, criterion: str) -> Gated:
    """Return a posterior with gates, or raise a `TypeError`."""
    if not isinstance(posterior, Gated):
        raise TypeError(
            f'criterion="{criterion}" ranks by gates, and a {type(posterior).__name__} posterior has none. Use '
            'bl.Variational(gates=...), or another criterion, such as "snr".'
        )
    return posterior


GATES = register_criterion(Criterion("gates", gates, unit_gates))
