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


def gate_criterion(name: str, score: Callable[[Scales], Tensor]) -> Criterion:
    """Register a criterion that ranks weights and units by the scores of their gates."""

    def gated(posterior: Posterior) -> Gated:
        if not isinstance(posterior, Gated):
            raise TypeError(
                f'criterion="{name}" ranks by gates, and a {type(posterior).__name__} posterior has none. Use '
                'bl.Variational(gates=...), or another criterion, such as "snr".'
            )
        return posterior

    def weights(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
        return score_weights(gated(posterior), score)

    def units(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
        return score_units(gated(posterior), groups, score)

    return register_criterion(Criterion(name, weights, units))


GATES = gate_criterion("gates", lambda scales: scales.gate.score(scales.own))
