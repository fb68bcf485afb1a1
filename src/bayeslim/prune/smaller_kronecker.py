"""A Kronecker posterior after units were cut, as a smaller Kronecker posterior.

Cutting whole rows and columns of every layer leaves P_RR = G_rr ⊗ A_cc + δ I, which is again of Kronecker form. Scores
of the units that are left then have their closed forms, where a general set of zeros would take a solve for each unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

import torch
from torch import Tensor

from bayeslim.compact.restricted import part_of_factor
from bayeslim.posteriors import Conditioned, Gated, Kronecker, KroneckerFactors, Posterior
from bayeslim.posteriors.kronecker_block import KroneckerBlock
from bayeslim.posteriors.saliency import Group
from bayeslim.types import Params


@singledispatch
def reduced(posterior: Posterior, groups: Sequence[Group]) -> tuple[Posterior, Sequence[Group]]:
    """Make an equal posterior over fewer weights, if there is one, and renumber."""
    return posterior, groups


@reduced.register
def _(posterior: Gated, groups: Sequence[Group]) -> tuple[Posterior, Sequence[Group]]:
    # The joint density of weights that share gates has no closed form: they count as independent.
    return posterior.marginals(), groups


@reduced.register
def _(posterior: Conditioned, groups: Sequence[Group]) -> tuple[Posterior, Sequence[Group]]:
    base = posterior.base
    if not isinstance(base, Kronecker) or not all(_separable(block, posterior.masks) for block in base.blocks):
        return posterior, groups
    mean: Params = {}
    factors: list[KroneckerFactors] = []
    prior: dict[str, float | Tensor] = {}
    numbers: Params = {}
    for block in base.blocks:
        rows, columns = _kept_lines(block, posterior.masks)
        layer = block.layer
        own = {name: posterior.mean[name] for name in layer.names}
        codes = {name: torch.arange(value.numel()).view(value.shape) for name, value in own.items()}
        has_bias = layer.bias is not None
        weight_columns = columns[:-1] if has_bias else columns
        mean[layer.weight] = layer.matrix(own)[0][rows][:, weight_columns]
        numbers[layer.weight] = layer.matrix(codes)[0].to(rows.device)[rows][:, weight_columns]
        if layer.bias is not None:
            mean[layer.bias], numbers[layer.bias] = own[layer.bias][rows], codes[layer.bias].to(rows.device)[rows]
        group = torch.zeros(1, dtype=torch.int64)
        outputs, inputs = (
            part_of_factor(f, group, n[None]) for f, n in ((block.outputs, rows), (block.inputs, columns))
        )
        factors.append(KroneckerFactors(layer.weight, outputs, inputs, layer.bias))
        prior |= dict.fromkeys(layer.names, block.prior)
    rest = {}
    for name, precision in base.rest.items():
        kept = posterior.masks[name].flatten().nonzero()[:, 0]
        mean[name], rest[name], numbers[name] = posterior.mean[name].flatten()[kept], precision.flatten()[kept], kept
        prior[name] = 0.0
    places = {name: _places(posterior.mean[name].numel(), number) for name, number in numbers.items()}
    smaller = Kronecker({name: mean[name] for name in posterior.mean}, factors, prior, rest=rest)
    return smaller, [_renumbered(group, places) for group in groups]


def _separable(block: KroneckerBlock, masks: Params) -> bool:
    """Tell whether a layer keeps whole rows and columns, its bias and one prior."""
    kept = block.layer.matrix(masks)
    rows, columns = kept.any(2, keepdim=True), kept.any(1, keepdim=True)
    whole = bool((kept == rows & columns).all()) and bool(rows.any())
    with_bias = block.layer.bias is None or bool(columns[..., -1].all())
    return whole and with_bias and kept.shape[0] == 1 and block.scales is None and block.corrected is None


def _kept_lines(block: KroneckerBlock, masks: Params) -> tuple[Tensor, Tensor]:
    kept = block.layer.matrix(masks)[0]
    return kept.any(1).nonzero()[:, 0], kept.any(0).nonzero()[:, 0]


def _places(size: int, numbers: Tensor) -> Tensor:
    """Map each of `size` weights to its new index; −1 for those that are cut."""
    places = torch.full((size,), -1, dtype=torch.int64)
    places[numbers.flatten().cpu()] = torch.arange(numbers.numel())
    return places


def _renumbered(group: Group, places: Params) -> Group:
    moved = {name: places[name][index.cpu()] for name, index in group.items()}
    return {name: index[index >= 0] for name, index in moved.items() if bool((index >= 0).any())}
