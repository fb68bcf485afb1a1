"""The rounding of a network to grids of given widths."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bayeslim.posteriors import Gaussian
from bayeslim.priors import Prior, SoftSharing
from bayeslim.quantise.fitting import fit_codebook, fit_uniform, given_codebook
from bayeslim.quantise.grids import Grid
from bayeslim.quantise.moves import Rounding, round_jointly, round_rows
from bayeslim.quantise.result import Quantised
from bayeslim.quantise.rounding import Rounder
from bayeslim.quantise.source import Source
from bayeslim.quantise.weights import Weights
from bayeslim.types import Params


@dataclass(frozen=True)
class Settings:
    """The options of rounding; see `quantise`."""

    strength: float
    codebook: Literal["kmeans", "prior"] | None
    move: Literal["joint", "row"] | None
    steps: int


def carry_out(
    source: Source, widths: Mapping[str, Tensor], settings: Settings, priors: Mapping[str, Prior]
) -> Quantised:
    """Round a copy of a network."""
    grids: dict[str, Grid] = {}
    rounders: dict[str, Rounder] = {}
    codes: Params = {}
    for name in (name for name, _ in source.network.named_parameters() if name in widths):
        if name in source.weights:
            weights = source.weights[name]
            grids[name], rounders[name], found = _fitted(weights, widths[name], settings, priors.get(name))
        else:
            weights = source.others[name]
            grids[name], _, found = fit_uniform(weights, widths[name], 0.0)
        codes[name] = weights.whole(found)
    if settings.move is not None and isinstance(source.posterior, Gaussian) and rounders:
        codes |= _moved(source, rounders, settings)
    network = copy.deepcopy(source.network)
    levels = {name: grids[name].decode(codes[name]) for name in codes}
    with torch.no_grad():
        for name, value in levels.items():
            network.get_parameter(name).copy_(value)
    kept = {name: len(source.weights.get(name) or source.others[name]) for name in codes}
    return Quantised(network, codes, grids, _losses(source, levels), kept)


def _fitted(weights: Weights, bits: Tensor, settings: Settings, prior: Prior | None) -> tuple[Grid, Rounder, Tensor]:
    if settings.codebook == "prior":
        assert isinstance(prior, SoftSharing)
        grid, rounder, codes = given_codebook(weights, prior.centres.detach(), prior.shares.detach(), settings.strength)
        if not settings.strength:  # take the most responsible component, which need not be the nearest
            codes = prior.log_joint(weights.values).argmax(-1)
        return grid, rounder, codes
    if settings.codebook == "kmeans":
        return fit_codebook(weights, int(bits[0]), settings.strength)
    return fit_uniform(weights, bits, settings.strength)


def _moved(source: Source, rounders: Mapping[str, Rounder], settings: Settings) -> Params:
    posterior = source.posterior
    mean, kept, precision = {}, {}, {}
    for name, value in posterior.mean.items():
        mean[name] = value.detach().double().flatten()
        kept[name] = torch.zeros_like(mean[name], dtype=torch.bool)
        precision[name] = torch.zeros_like(mean[name])
        if name in rounders:
            weights = source.weights[name]
            kept[name][weights.places] = True
            precision[name][weights.places] = weights.precision
    shapes = {name: value.shape for name, value in posterior.mean.items()}
    flat = {name: rounder.flat(shapes[name]) for name, rounder in rounders.items()}
    task = Rounding(mean, kept, precision, flat, shapes)
    codes = round_rows(posterior, task) if settings.move == "row" else round_jointly(posterior, task, settings.steps)
    return {name: codes[name].reshape(shapes[name]) for name in rounders}


def _losses(source: Source, levels: Params) -> dict[str, float]:
    """Compute ½ δᵀ P δ for each parameter."""
    posterior = source.posterior
    if not isinstance(posterior, Gaussian):
        return {
            name: float(weights.loss(levels[name].flatten()[weights.places].double()).sum())
            for name, weights in source.weights.items()
            if name in levels
        }
    off = {
        name: levels[name].double() - mean.double() if name in levels else torch.zeros_like(mean)
        for name, mean in posterior.mean.items()
    }
    image = posterior.precision_product(off)
    return {name: 0.5 * float((off[name] * image[name]).sum()) for name in source.weights if name in levels}
