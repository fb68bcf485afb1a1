"""The masks of one block: which of its weights go, by their scores.

A block takes the whole network's fraction. Within it, "layer" cuts the same fraction of every weight, and "global"
ranks the weights of the block together, where every weight keeps at least `MIN_CAPACITY` of the fraction that stays.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bayeslim.prune.cuts import EmptyLayer
from bayeslim.prune.ranking import MIN_CAPACITY
from bayeslim.types import Params


def lowest(scores: Tensor, count: int) -> Tensor:
    """Mask all but the `count` lowest scores; of equals, the first go first."""
    kept = torch.ones(scores.numel(), dtype=torch.bool, device=scores.device)
    kept[scores.flatten().argsort(stable=True)[:count]] = False
    return kept.view(scores.shape)


def same_fraction(scores: Mapping[str, Tensor], fraction: float) -> Params:
    """Cut a fraction of every weight."""
    return {name: lowest(value, _count(value, fraction)) for name, value in scores.items()}


def ranked_together(scores: Mapping[str, Tensor], fraction: float, keep_best: bool) -> Params:
    """Cut a fraction of all weights together.

    Args:
        scores: by weight, comparable with each other.
        fraction: of the weights of the block.
        keep_best: whether every weight keeps at least `MIN_CAPACITY` of the fraction that stays of the block.

    Raises:
        EmptyLayer: if a weight would be cut whole.
    """
    total = sum(value.numel() for value in scores.values())
    goal = round(fraction * total)
    most = {n: v.numel() for n, v in scores.items()}
    if keep_best:
        most = {n: min(size - 1, int(size * (1 - MIN_CAPACITY * (1 - fraction)))) for n, size in most.items()}
    counts: dict[str, int] = {}
    free = dict(scores)
    while free:
        kept = lowest(torch.cat([v.flatten() for v in free.values()]), goal - sum(counts.values()))
        sizes = [v.numel() for v in free.values()]
        asked = {n: int((~part).sum()) for n, part in zip(free, kept.split(sizes), strict=True)}
        full = {n: most[n] for n in free if asked[n] > most[n]}
        if not full:
            counts |= asked
            break
        counts |= full  # these give as much as they may, and the others give the rest
        free = {n: v for n, v in free.items() if n not in full}
    empty = [name for name, count in counts.items() if count == scores[name].numel()]
    if empty:
        raise EmptyLayer(
            f'By the scores alone all of "{empty[0]}" would be cut. Use Budget(..., empty_layers="keep best"), '
            'scope="layer", or protect it.'
        )
    return {name: lowest(value, counts[name]) for name, value in scores.items()}


def _count(scores: Tensor, fraction: float) -> int:
    return min(scores.numel() - 1, round(fraction * scores.numel()))
