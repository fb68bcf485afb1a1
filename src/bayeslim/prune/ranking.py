"""The order in which candidates are cut, and how far down the order a cut may go.

A cut is always a beginning of the ranking, so that every goal is a search for one number: how many candidates to cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslim.prune.candidates import Candidates

MIN_CAPACITY = 0.25
"""A global cut leaves every layer at least this much of the fraction that it leaves of the whole network."""
MAX_GRID_POINTS = 4096
FIXED_POINT_ITERATIONS = 40
ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Ranking:
    """Candidates in the order in which they are cut.

    Attributes:
        candidates: everything that could be cut.
        order: their indices, first to be cut first; those that must stay are not in it.
        gone: the number of those cut already; they stand first.
        limit: the most that may be cut.
        blocked: the layer that would lose everything beyond the limit; "" if there is none.
        spared: layers that keep their best candidate for that reason.
    """

    candidates: Candidates
    order: Tensor
    gone: int
    limit: int
    blocked: str
    spared: tuple[str, ...]

    def cut(self, count: int) -> Tensor:
        """Return the indices of the first `count` candidates."""
        return self.order[:count]


def rank(
    candidates: Candidates,
    scope: str,
    keep_best: bool,
    by_size: bool = False,
    min_capacity: float = 0.0,
    growth: Mapping[str, float] | None = None,
) -> Ranking:
    """Rank candidates by score, then by their `ties`, then by place in the network.

    Args:
        candidates: everything that could be cut.
        scope: "global" compares scores of all layers; "layer" takes the same fraction of every layer.
        keep_best: never cut a layer's best candidate; otherwise the ranking ends before the first layer would be empty.
        by_size: whether to rank by the score per weight of a candidate.
        min_capacity: a global cut to a fraction f of the present network leaves at least `min_capacity` · f of every
            layer, because scores of single weights say little about a layer that loses most of them.
        growth: factors by layer that scores of different layers are compared with; 1 where there is none.
    """
    scores = candidates.scores / candidates.sizes if by_size else candidates.scores
    if growth:
        factors = torch.tensor([growth.get(name, 1.0) for name in candidates.layer_names], dtype=scores.dtype)
        scores = scores * factors.to(scores.device)[candidates.layers]
    scores = torch.where(candidates.gone, -torch.inf, scores)
    order = candidates.ties.argsort(stable=True)
    order = order[scores[order].argsort(stable=True)]
    if scope == "layer":
        order = order[_share(candidates.layers[order], len(candidates.layer_names)).argsort(stable=True)]
    order = order[(~candidates.gone[order]).to(torch.uint8).argsort(stable=True)]
    gone = int(candidates.gone.sum())
    if scope == "global" and min_capacity and not candidates.may_empty:
        order = torch.cat([order[:gone], _with_capacity(candidates, order[gone:], min_capacity)])
    if candidates.may_empty:
        return Ranking(candidates, order, gone, len(order), "", ())
    last = _last_places(candidates.layers[order], len(candidates.layer_names))
    if keep_best:
        stays = torch.zeros_like(order, dtype=torch.bool)
        stays[last] = True
        order = order[~stays]
        return Ranking(candidates, order, int(candidates.gone[order].sum()), len(order), "", candidates.layer_names)
    first = int(last.argmin())
    return Ranking(candidates, order, gone, int(last[first]), candidates.layer_names[first], ())


def _with_capacity(candidates: Candidates, order: Tensor, min_capacity: float) -> Tensor:
    """Delay candidates that would leave too little of their layer.

    With the first t candidates of the plain order, layer l of n_l candidates would lose the fraction s_l(t). It may
    lose 1 − min_capacity (1 − f), with f the fraction that the whole network loses:

        f(t) = Σ_l n_l / n · min(s_l(t), 1 − min_capacity (1 − f(t))),

    a fixed point of a contraction. A candidate at the fraction s of its layer goes once f(t) ≥ 1 − (1 − s) /
    min_capacity.
    """
    count = len(order)
    if not count:
        return order
    layers = candidates.layers[order]
    grid = (
        torch.linspace(0, count, min(count, MAX_GRID_POINTS) + 1, dtype=torch.float64).round().long().to(order.device)
    )
    lost = grid.double() / count
    shares, sizes = [], []
    for layer in layers.unique().tolist():
        places = (layers == layer).nonzero()[:, 0] + 1
        shares.append(torch.searchsorted(places, grid, right=True).double() / len(places))
        sizes.append(len(places) / count)
    for _ in range(FIXED_POINT_ITERATIONS):
        cap = 1 - min_capacity * (1 - lost)
        lost = torch.stack([size * torch.minimum(s, cap) for size, s in zip(sizes, shares, strict=True)]).sum(0)
    earliest = 1 - (1 - _share(layers, len(candidates.layer_names))) / min_capacity
    release = grid[torch.searchsorted(lost, earliest - ROUNDING).clamp(max=len(grid) - 1)]
    return order[torch.maximum(torch.arange(1, count + 1, device=order.device), release).argsort(stable=True)]


def _last_places(layers: Tensor, count: int) -> Tensor:
    """Find the last place of every layer in an order that has all of them."""
    by_layer = layers.argsort(stable=True)
    return by_layer[torch.bincount(layers, minlength=count).cumsum(0) - 1]


def _share(layers: Tensor, count: int) -> Tensor:
    """Compute the fraction of its layer up to each candidate, in order of score."""
    by_layer = layers.argsort(stable=True)
    sizes = torch.bincount(layers, minlength=count)
    starts = sizes.cumsum(0) - sizes
    rank = torch.empty_like(layers)
    rank[by_layer] = torch.arange(len(layers), device=layers.device) - starts[layers[by_layer]]
    return (rank.double() + 1) / sizes[layers]
