"""Grids that fit weights: the step of an even grid, or the levels of a codebook, with the least expected loss.

Scales are searched over a range (too small clips large weights, too large rounds all of them coarsely), then set by
weighted least squares: given the codes c, the best scale is Σ p w c / Σ p c². Codebooks are weighted k-means with
weights p and the level zero pinned. With a strength above zero, rounding by frequencies alternates with both, which
lowers

    ½ Σ p δ² + λ Σ −log P(code)

until nothing changes (entropy-constrained vector quantisation: Chou, Lookabaugh & Gray 1989).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeslim.quantise.grids import Codebook, Grid, Uniform, limit_of, storable
from bayeslim.quantise.rounding import CodebookRounder, UniformRounder, code_lengths
from bayeslim.quantise.weights import Weights

SEARCHED = 2**16
"""How many weights of a parameter the search for a scale looks at."""
SCALES = torch.logspace(0, math.log10(0.05), 48, dtype=torch.float64)
"""The scales that are tried, as fractions of the one that reaches the largest weight."""
ROUNDS = 20
"""How often rounding and counting alternate at most."""


def fit_scales(weights: Weights, bits: Tensor) -> Tensor:
    """The steps (units,) of even grids of given widths (units,) with the least loss when rounding to the nearest."""
    limit = limit_of(bits).double()
    largest = torch.zeros(weights.units, dtype=torch.float64, device=weights.values.device)
    largest.scatter_reduce_(0, weights.unit, weights.values.abs(), "amax")
    widest = torch.where(largest > 0, largest, 1.0) / limit
    some = weights.thinned(SEARCHED)
    best, lowest = widest, torch.full_like(widest, torch.inf)
    for share in SCALES.tolist():
        scale = _refined(some, _even(some, widest * share, bits, None), widest * share)
        loss = some.loss(_levels(some, _even(some, scale, bits, None), scale))
        better = loss < lowest
        best, lowest = torch.where(better, scale, best), torch.where(better, loss, lowest)
    return storable(best)


def nearest_losses(weights: Weights, bits: int) -> Tensor:
    """What rounding to the nearest level of even grids of a width costs in nats, (units,)."""
    width = torch.full((weights.units,), bits, device=weights.values.device)
    scale = fit_scales(weights, width).double()
    return weights.loss(_levels(weights, _even(weights, scale, width, None), scale))


def fit_uniform(weights: Weights, bits: Tensor, strength: float) -> tuple[Uniform, UniformRounder, Tensor]:
    """An even grid, its rounder over the whole parameter, and the codes of the weights (m,)."""
    scale = fit_scales(weights, bits)
    codes = _even(weights, scale.double(), bits, None)
    most = int(limit_of(bits).max())
    lengths = None
    if strength > 0:
        for _ in range(ROUNDS):
            lengths = strength * code_lengths(_with_zeros(weights, codes), -most, most)
            scale = storable(_refined(weights, codes, scale.double()))
            before, codes = codes, _even(weights, scale.double(), bits, lengths)
            if bool((codes == before).all()):
                break
    grid = Uniform(weights.per_unit(scale), weights.per_unit(bits))
    return grid, UniformRounder(grid.scale.double(), grid.limit, lengths, grid.bits > 1), codes


def fit_codebook(weights: Weights, bits: int, strength: float) -> tuple[Codebook, CodebookRounder, Tensor]:
    """A codebook of 2^bits levels by weighted k-means, its rounder, and the codes of the weights (m,)."""
    levels = _starting_levels(weights, 2**bits - 1)
    lengths = None
    codes = CodebookRounder(levels, None)(weights.values, weights.precision)
    for _ in range(ROUNDS):
        if strength > 0:
            lengths = strength * code_lengths(_with_zeros(weights, codes), 0, len(levels) - 1)
        levels = storable(_centres(weights, codes, levels)).double()
        before, codes = codes, CodebookRounder(levels, lengths)(weights.values, weights.precision)
        if bool((codes == before).all()):
            break
    used = torch.bincount(codes, minlength=len(levels)) > 0
    used[0] = True  # the code of zeros that were cut before
    codes, levels = (used.cumsum(0) - 1)[codes], levels[used]
    return Codebook(levels.float()), CodebookRounder(levels, None if lengths is None else lengths[used]), codes


def given_codebook(
    weights: Weights, levels: Tensor, shares: Tensor, strength: float
) -> tuple[Codebook, CodebookRounder, Tensor]:
    """A codebook that is known, with the share of the weights that each level is expected to have."""
    grid = Codebook(storable(levels))
    lengths = -strength * shares.double().log() if strength > 0 else None
    rounder = CodebookRounder(grid.values.double(), lengths)
    return grid, rounder, rounder(weights.values, weights.precision)


def coded_bits(codes: Tensor, grid: Grid) -> float:
    """About how many bits an entropy coder needs for a parameter: the entropy of its codes, and its grid's numbers."""
    counts = torch.unique(codes, return_counts=True)[1].double()
    entropy = -(counts * (counts / counts.sum()).log2()).sum()
    return float(entropy) + 16 * grid.numbers.numel()


def _even(weights: Weights, scale: Tensor, bits: Tensor, lengths: Tensor | None) -> Tensor:
    rounder = UniformRounder(scale, limit_of(bits), lengths, bits > 1)
    return rounder.at(weights.unit)(weights.values, weights.precision)


def _levels(weights: Weights, codes: Tensor, scale: Tensor) -> Tensor:
    return codes * scale[weights.unit]


def _refined(weights: Weights, codes: Tensor, scale: Tensor) -> Tensor:
    """Σ p w c / Σ p c² of each unit; as before where all codes are zero."""
    pull = weights.totals(weights.precision * weights.values * codes)
    size = weights.totals(weights.precision * codes.double().square())
    return torch.where((size > 0) & (pull > 0), pull / size, scale)


def _with_zeros(weights: Weights, codes: Tensor) -> Tensor:
    return torch.cat([codes, codes.new_zeros(weights.zeros)])


def _starting_levels(weights: Weights, count: int) -> Tensor:
    """Zero, and levels at quantiles of the weights."""
    some = weights.thinned(SEARCHED).values.sort().values
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count * max(0, len(some) - 1)
    chosen = some[places.round().long().to(some.device)] if len(some) else some.new_zeros(count)
    return torch.cat([chosen.new_zeros(1), chosen])


def _centres(weights: Weights, codes: Tensor, levels: Tensor) -> Tensor:
    """Weighted means of the weights of each level, which stays where it is if it has none; zero stays zero."""
    totals = torch.zeros_like(levels).index_add_(0, codes, weights.precision * weights.values)
    sizes = torch.zeros_like(levels).index_add_(0, codes, weights.precision)
    centres = torch.where(sizes > 0, totals / sizes, levels)
    centres[0] = 0
    return centres
