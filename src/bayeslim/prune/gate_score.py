"""Scores by gates: how much the gates of weights and units want them to stay, in the unit of the gate's paper.

A weight goes when any of its gates closes: it has the lowest of their scores. A unit goes when the gate at its output
closes, or when those of all layers that read it do: it has the lowest score of the first, or the highest of the second,
whichever is lower. (A preactivation that is constant still makes a unit.) What has no gate is never asked to go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayeslim.posteriors import Gated, Posterior, Scales
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.types import Params

READING = ("inputs", "hidden", "heads")
"""The sides at which a layer reads units; at "outputs" it makes them."""


def gates(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """The lowest score of a weight's gates; infinite where it has none."""
    gated = _gated(posterior)
    found = {name: torch.full_like(mean, torch.inf, dtype=torch.float64) for name, mean in gated.mean.items()}
    for scales in gated.scales:
        for part in scales.place.parts:
            scores = found[part.parameter]
            own = scales.place.along(_scores(scales), part, scores.ndim)
            found[part.parameter] = torch.minimum(scores, own.to(scores.device))
    return found


def unit_gates(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """The score of the gates that stand for a unit: those all of whose weights go with it."""
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
    """Finite, so that a unit whose gates are cut is told from one that has none."""
    lowest = torch.finfo(torch.float64).min
    return scales.gate.score(scales.own).double().clamp(min=lowest).masked_fill(scales.cut, lowest)


def _numbers(scales: Scales, gated: Gated) -> Params:
    """The number of the gate of every weight, flat, by parameter."""
    place, found = scales.place, {}
    for part in place.parts:
        shape = gated.mean[part.parameter].shape
        found[part.parameter] = place.along(torch.arange(place.count), part, len(shape)).expand(shape).flatten()
    return found


def _whole(scales: Scales, numbers: Params, group: Group) -> Tensor:
    """Which gates have all their weights in a group, (count,)."""
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
