"""The order in which candidates are cut, and how far down the order a cut may go.

A cut is always a beginning of the ranking, so that every goal is a search for one number: how many candidates to cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslim.prune.candidates import Candidates


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


def rank(candidates: Candidates, scope: str, keep_best: bool, by_size: bool = False) -> Ranking:
    """Rank candidates by score, equal ones by their ties, then by their place in the network.

    Args:
        candidates: everything that could be cut.
        scope: "global" compares scores of all layers; "layer" takes the same fraction of every layer.
        keep_best: never cut a layer's best candidate; otherwise the ranking ends before the first layer would be empty.
        by_size: whether to rank by the score per weight of a candidate.
    """
    scores = candidates.scores / candidates.sizes if by_size else candidates.scores
    scores = torch.where(candidates.gone, -torch.inf, scores)
    order = candidates.ties.argsort(stable=True)
    order = order[scores[order].argsort(stable=True)]
    if scope == "layer":
        order = order[_share(candidates.layers[order], len(candidates.layer_names)).argsort(stable=True)]
    order = order[(~candidates.gone[order]).to(torch.uint8).argsort(stable=True)]
    gone = int(candidates.gone.sum())
    if candidates.may_empty:
        return Ranking(candidates, order, gone, len(order), "", ())
    last = torch.zeros(len(candidates.layer_names), dtype=torch.int64)
    last = last.scatter_reduce(0, candidates.layers[order], torch.arange(len(order)), "amax")
    if keep_best:
        stays = torch.zeros(len(order), dtype=torch.bool)
        stays[last] = True
        order = order[~stays]
        return Ranking(candidates, order, int(candidates.gone[order].sum()), len(order), "", candidates.layer_names)
    first = int(last.argmin())
    return Ranking(candidates, order, gone, int(last[first]), candidates.layer_names[first], ())


def _share(layers: Tensor, count: int) -> Tensor:
    """Compute, for candidates in order of score, the fraction of its layer up to each, from 0 to 1."""
    by_layer = layers.argsort(stable=True)
    sizes = torch.bincount(layers, minlength=count)
    starts = sizes.cumsum(0) - sizes
    rank = torch.empty_like(layers)
    rank[by_layer] = torch.arange(len(layers)) - starts[layers[by_layer]]
    return (rank.double() + 1) / sizes[layers]
