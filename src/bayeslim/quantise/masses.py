"""How much of the posterior's mass is nearest to each level: what to expect of codes, and of zeros.

A weight of mean m and precision p is nearest to the level between the edges e and e' with probability
Φ((e' − m) √p) − Φ((e − m) √p).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayeslim.quantise.grids import Codebook, Grid, Uniform
from bayeslim.quantise.weights import Weights

MOST_TABLED = 9
"""The widest codes, in bits, whose probabilities are worth a table."""
MOST = 2**12
"""How many weights of a parameter are looked at, evenly spread over it."""


def code_masses(weights: Weights, grid: Grid) -> Tensor:
    """The mean over weights of the probabilities of all codes, from the lowest to the highest."""
    if isinstance(grid, Codebook):
        levels, order = grid.values.double().sort()
        edges = ((levels[1:] + levels[:-1]) / 2).expand(weights.units, -1)
    else:
        edges, order = _edges(grid).expand(weights.units, -1), None
    every = slice(None, None, -(-len(weights) // MOST))
    away = edges[weights.unit[every]] - weights.values[every, None]
    below = _below(away, weights.precision[every, None]).mean(0)
    masses = torch.cat([below, below.new_ones(1)]) - torch.cat([below.new_zeros(1), below])
    return masses if order is None else torch.empty_like(masses).scatter_(0, order, masses)


def presence(weights: Weights, grid: Grid) -> Tensor:
    """How many weights of each column are expected not to be nearest to zero, of a parameter's shape but the first."""
    low, high = (_below(edge - weights.values, weights.precision) for edge in _around_zero(weights, grid))
    away = 1 - (high - low)
    columns = weights.shape[1:]
    found: Tensor = away.new_zeros(columns.numel()).index_add_(0, weights.places % columns.numel(), away)
    return found.reshape(columns)


def _below(away: Tensor, precision: Tensor) -> Tensor:
    """How probable it is to be below an edge so far from the mean; an infinite one, whatever the precision."""
    found: Tensor = torch.special.ndtr(torch.where(away.isinf(), away, away * precision.sqrt()))
    return found


def _around_zero(weights: Weights, grid: Grid) -> tuple[Tensor, Tensor]:
    """The edges between which zero is the nearest level, for each weight or for all of them."""
    if isinstance(grid, Codebook):
        values, infinite = grid.values.double(), grid.values.new_tensor([torch.inf]).double()
        return torch.cat([values[values < 0], -infinite]).max() / 2, torch.cat([values[values > 0], infinite]).min() / 2
    half = (0.5 * grid.scale.double() * (grid.bits > 1)).reshape(-1)  # with one bit there is no level zero
    half = half.expand(weights.units)[weights.unit]
    return -half, half


def _edges(grid: Uniform) -> Tensor:
    """Between each code and the next, (units, codes − 1); infinite where a unit has not so many codes."""
    scale, limit, bits = (t.double().reshape(-1, 1) for t in (grid.scale, grid.limit, grid.bits))
    most = int(limit.max())
    edges = torch.arange(-most, most, dtype=torch.float64, device=scale.device) + 0.5
    within = edges.abs() < limit
    # with one bit there is no level zero, and its two edges are one
    return torch.where(within, edges * scale * (bits > 1), edges.sign() * torch.inf)
