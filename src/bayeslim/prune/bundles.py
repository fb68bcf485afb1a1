"""Bundles of units: cuts that leave widths which configs can describe and kernels like.

A bundle is a set of units that is cut as one. With `uniform=True` a bundle takes as many units from every layer of the
same kind and width, so that these layers have the same width after any cut. With `round_to=k` the width that stays, in
channels, is a multiple of k. The units of a layer are put into bundles from the worst to the best, so that a cut of
bundles cuts the worst units of each layer; the score of a bundle is the sum of the scores of its units.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from bayeslim.errors import BayeslimError
from bayeslim.prune.candidates import Candidates


def bundled(candidates: Candidates, by_size: bool, *, uniform: bool, round_to: int) -> Candidates:
    """Put units into bundles."""
    scores = candidates.scores / candidates.sizes if by_size else candidates.scores
    scores = torch.where(candidates.gone, -torch.inf, scores)
    order = candidates.ties.argsort(stable=True)
    order = order[scores[order].argsort(stable=True)]
    groups: dict[tuple[str, int], list[Tensor]] = {}
    steps: dict[tuple[str, int], int] = {}
    for layer, name in enumerate(candidates.layer_names):
        members = order[candidates.layers[order] == layer]
        kind, step = _kind_and_step(candidates, int(members[0]), round_to)
        key = (kind if uniform else name, len(members))
        groups.setdefault(key, []).append(members)
        steps[key] = math.lcm(steps.get(key, 1), step)
    bundles: list[tuple[str, list[Tensor]]] = []  # the parts of some layers, the first to be cut first
    left = dict(candidates.left)
    for key, layers in groups.items():
        count, step = key[1], steps[key]
        names = [candidates.layer_names[int(candidates.layers[members[0]])] for members in layers]
        cuts = [count - kept for kept in range((count - 1) // step * step, 0, -step)]
        if cuts:
            parts = [torch.cat([m[i:j] for m in layers]) for i, j in zip([0, *cuts], [*cuts, count], strict=True)]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            bundles.append((names[0] + more, parts))
        else:
            left |= dict.fromkeys(names, f"round_to={round_to} leaves it no smaller width")
    if not bundles:
        raise BayeslimError(
            f"No unit can be cut: {'; '.join(f'{name}: {why}' for name, why in left.items())}. Lower round_to."
        )
    return _candidates(candidates, bundles, left, by_size)


def _kind_and_step(candidates: Candidates, member: int, round_to: int) -> tuple[str, int]:
    """Return the kind of a unit, and the number of units in a whole multiple."""
    graph = candidates.graph
    assert graph is not None
    unit = graph.units[candidates.units[member]]
    # a table with one number a head is no matrix product
    widths = {len(part.indices) for part in (*unit.incoming, *unit.outgoing) if part.parameter in graph.contracted}
    return unit.kind, math.lcm(*(round_to // math.gcd(round_to, width) for width in widths))


def _candidates(
    candidates: Candidates, bundles: list[tuple[str, list[Tensor]]], left: dict[str, str], by_size: bool
) -> Candidates:
    """Make candidates of bundles."""
    parts = [part for _, own in bundles for part in own]
    lengths = [len(own) for _, own in bundles]
    sizes = torch.stack([(candidates.sizes[part] * ~candidates.gone[part]).sum() for part in parts])
    counts = sizes.clamp_min(1) if by_size else torch.stack([(~candidates.gone[p]).sum().clamp_min(1) for p in parts])

    def averaged(values: Tensor) -> Tensor:
        # A bundle never ranks below one of the same layers that goes before it: earlier cuts may have been uneven.
        sums = torch.stack([torch.where(candidates.gone[part], 0.0, values[part]).sum() for part in parts])
        means = (sums / counts).split(lengths)
        return torch.cat([part.cummax(0).values for part in means])

    def members(cut: Tensor) -> Tensor:
        return torch.cat([parts[place] for place in cut.tolist()]) if len(cut) else cut

    scores = averaged(candidates.scores)
    return replace(
        candidates,
        scores=scores * counts if by_size else scores,
        ties=averaged(candidates.ties),
        sizes=sizes.clamp_min(1),
        layers=torch.repeat_interleave(torch.arange(len(bundles)), torch.tensor(lengths)),
        layer_names=tuple(name for name, _ in bundles),
        gone=torch.stack([candidates.gone[part].all() for part in parts]),
        masks=lambda cut: candidates.masks(members(cut)),
        unread=lambda cut: candidates.unread(members(cut)),
        left=left,
        units=(),
    )
