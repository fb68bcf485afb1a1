"""The fit of grids: the step of a uniform grid, or the levels of a codebook, with the least expected loss.

Scales are searched over a range (a small one clips large weights, a large one rounds coarsely), then refined by
weighted least squares: given the codes c, the best scale is Σ p w c / Σ p c². Codebooks come from weighted k-means with
weights p and one level fixed at zero. With a strength above zero, fitting and rounding by code lengths alternate, which
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

MAX_SEARCHED_WEIGHTS = 2**16
"""The weights of a parameter that the search for a scale samples."""
SCALES = torch.logspace(0, math.log10(0.05), 48, dtype=torch.float64)
"""The scales tried, as fractions of the one that reaches the largest weight."""
MAX_ROUNDS = 20
"""The most rounds of fitting and rounding."""


def fit_scales(weights: Weights, bits: Tensor) -> Tensor:
    """Search the steps (units,) of uniform grids with the least nearest-level loss."""
    limit = limit_of(bits).double()
    largest = torch.zeros(weights.units, dtype=torch.float64, device=weights.values.device)
    largest.scatter_reduce_(0, weights.unit, weights.values.abs(), "amax")
    widest = torch.where(largest > 0, largest, 1.0) / limit
    some = weights.thinned(MAX_SEARCHED_WEIGHTS)
    best, lowest = widest, torch.full_like(widest, torch.inf)
    for share in SCALES.tolist():
        scale = _refined(some, _round_uniform(some, widest * share, bits, None), widest * share)
        loss = some.loss(_levels(some, _round_uniform(some, scale, bits, None), scale))
        better = loss < lowest
        best, lowest = torch.where(better, scale, best), torch.where(better, loss, lowest)
    return storable(best)


def nearest_losses(weights: Weights, bits: int) -> Tensor:
    """Compute the loss (units,) of rounding to the nearest uniform level, in nats."""
    width = torch.full((weights.units,), bits, device=weights.values.device)
    scale = fit_scales(weights, width).double()
    return weights.loss(_levels(weights, _round_uniform(weights, scale, width, None), scale))


def fit_uniform(weights: Weights, bits: Tensor, strength: float) -> tuple[Uniform, UniformRounder, Tensor]:
    """Fit a uniform grid: the grid, the parameter's rounder, and the codes (m,)."""
    scale = fit_scales(weights, bits)
    codes = _round_uniform(weights, scale.double(), bits, None)
    most = int(limit_of(bits).max())
    lengths = None
    if strength > 0:
        for _ in range(MAX_ROUNDS):
            lengths = strength * code_lengths(_with_zeros(weights, codes), -most, most)
            scale = storable(_refined(weights, codes, scale.double()))
            before, codes = codes, _round_uniform(weights, scale.double(), bits, lengths)
            if bool((codes == before).all()):
                break
    grid = Uniform(weights.per_unit(scale), weights.per_unit(bits))
    return grid, UniformRounder(grid.scale.double(), grid.limit, lengths, grid.bits > 1), codes


def fit_codebook(weights: Weights, bits: int, strength: float) -> tuple[Codebook, CodebookRounder, Tensor]:
    """Fit 2^bits levels: the codebook, its rounder, and the codes (m,)."""
    levels = _starting_levels(weights, 2**bits - 1)
    lengths = None
    codes = CodebookRounder(levels, None)(weights.values, weights.precision)
    for _ in range(MAX_ROUNDS):
        if strength > 0:
            lengths = strength * code_lengths(_with_zeros(weights, codes), 0, len(levels) - 1)
        levels = storable(_centres(weights, codes, levels)).double()
        before, codes = codes, CodebookRounder(levels, lengths)(weights.values, weights.precision)
        if bool((codes == before).all()):
            break
    used = torch.bincount(codes, minlength=len(levels)) > 0
    used[0] = True  # the code of weights that were cut before
    codes, levels = (used.cumsum(0) - 1)[codes], levels[used]
    return Codebook(levels.float()), CodebookRounder(levels, None if lengths is None else lengths[used]), codes


def given_codebook(
    weights: Weights, levels: Tensor, shares: Tensor, strength: float
) -> tuple[Codebook, CodebookRounder, Tensor]:
    """Round to a known codebook whose levels have known shares of the weights."""
    grid = Codebook(storable(levels))
    lengths = -strength * shares.double().log() if strength > 0 else None
    rounder = CodebookRounder(grid.values.double(), lengths)
    return grid, rounder, rounder(weights.values, weights.precision)


def coded_bits(codes: Tensor, grid: Grid) -> float:
    """Estimate the coded bits of a parameter: entropy, and the grid's numbers."""
    counts = torch.unique(codes, return_counts=True)[1].double()
    entropy = -(counts * (counts / counts.sum()).log2()).sum()
    return float(entropy) + 16 * grid.numbers.numel()


def _round_uniform(weights: Weights, scale: Tensor, bits: Tensor, lengths: Tensor | None) -> Tensor:
    rounder = UniformRounder(scale, limit_of(bits), lengths, bits > 1)
    return rounder.at(weights.unit)(weights.values, weights.precision)


def _levels(weights: Weights, codes: Tensor, scale: Tensor) -> Tensor:
    return codes * scale[weights.unit]


def _refined(weights: Weights, codes: Tensor, scale: Tensor) -> Tensor:
    """Compute Σ p w c / Σ p c² of each unit; the scale stays where all codes are zero."""
    pull = weights.totals(weights.precision * weights.values * codes)
    size = weights.totals(weights.precision * codes.double().square())
    return torch.where((size > 0) & (pull > 0), pull / size, scale)


def _with_zeros(weights: Weights, codes: Tensor) -> Tensor:
    return torch.cat([codes, codes.new_zeros(weights.zeros)])


def _starting_levels(weights: Weights, count: int) -> Tensor:
    """Place the first levels: zero, and quantiles of the weights."""
    some = weights.thinned(MAX_SEARCHED_WEIGHTS).values.sort().values
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count * max(0, len(some) - 1)
    chosen = some[places.round().long().to(some.device)] if len(some) else some.new_zeros(count)
    return torch.cat([chosen.new_zeros(1), chosen])


def _centres(weights: Weights, codes: Tensor, levels: Tensor) -> Tensor:
    """Move each level to the weighted mean of its weights; empty levels and zero stay."""
    totals = torch.zeros_like(levels).index_add_(0, codes, weights.precision * weights.values)
    sizes = torch.zeros_like(levels).index_add_(0, codes, weights.precision)
    centres = torch.where(sizes > 0, totals / sizes, levels)
    centres[0] = 0
    return centres
