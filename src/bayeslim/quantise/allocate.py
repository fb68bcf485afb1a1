"""Bit allocation: the bits of each group of weights with the least loss for a rate.

    minimise Σ_g loss_g(b_g)      subject to  Σ_g rate_g(b_g) ≤ budget

Under a Gaussian posterior rounding costs ½ Σ p δ² nats, about n Δ² / 24σ² for a grid of step Δ. One more bit divides
the loss by four, so sharp posteriors get more bits than wide ones.

A few groups (layers) are solved exactly: one group after the other, keeping the Pareto frontier of rate and loss. Many
groups (units) are each small against the budget: the Lagrangian walks down every group's lower convex hull, steepest
descent first, through the optima of all rates (Shoham & Gersho 1988), and spends the rest on the largest gains that
still fit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

MAX_EXACT_GROUPS = 64
"""The most groups that are solved exactly."""
MAX_FRONTIER_POINTS = 1 << 14
"""The most points of the Pareto frontier that are kept; of more, evenly spread ones are."""

Point = tuple[float, float]
"""A rate and the loss at that rate."""


class TooSmall(ValueError):
    """A budget below the smallest possible one, which is the argument."""


def allocate(options: Sequence[Sequence[Point]], budget: float) -> list[int]:
    """Choose one option (rate, loss) for every group, the rates at most the budget.

    Returns:
        for each group, the index of its option.

    Raises:
        TooSmall: if even the smallest options take more.

    >>> allocate([[(1, 9.0), (2, 1.0)], [(1, 3.0), (2, 2.0)]], budget=3)
    [1, 0]
    """
    least = sum(min(rate for rate, _ in points) for points in options)
    room = budget + 1e-9 * max(1.0, abs(budget))
    if least > room:
        raise TooSmall(least)
    return (solve_exactly if len(options) <= MAX_EXACT_GROUPS else descend_hulls)(options, room)


def solve_exactly(options: Sequence[Sequence[Point]], budget: float) -> list[int]:
    """Solve exactly: keep the Pareto frontier of rate and loss, group by group."""
    rates, losses = np.zeros(1), np.zeros(1)
    history = []
    after = [sum(min(r for r, _ in points) for points in options[g + 1 :]) for g in range(len(options))]
    for points, reserved in zip(options, after, strict=True):
        own = np.array(points, dtype=float)
        rate = (rates[:, None] + own[:, 0]).ravel()
        loss = (losses[:, None] + own[:, 1]).ravel()
        order = np.lexsort((loss, rate))
        order = order[rate[order] + reserved <= budget]
        best = np.minimum.accumulate(loss[order])
        order = order[np.concatenate([[True], best[1:] < best[:-1]])]
        if len(order) > MAX_FRONTIER_POINTS:
            order = order[np.linspace(0, len(order) - 1, MAX_FRONTIER_POINTS).round().astype(int)]
        rates, losses = rate[order], loss[order]
        history.append((order // len(points), order % len(points)))
    place, chosen = len(rates) - 1, []
    for before, option in reversed(history):
        chosen.append(int(option[place]))
        place = before[place]
    return chosen[::-1]


def descend_hulls(options: Sequence[Sequence[Point]], budget: float) -> list[int]:
    """Solve by the Lagrangian: take the steepest step that fits, until none does."""
    hulls = [_hull(points) for points in options]
    chosen = [0] * len(hulls)
    used = sum(options[group][hull[0]][0] for group, hull in enumerate(hulls))
    steps: list[tuple[float, int]] = []

    def offer(group: int) -> None:
        hull, at = hulls[group], chosen[group]
        if at + 1 < len(hull):
            (rate, loss), (more, less) = options[group][hull[at]], options[group][hull[at + 1]]
            heapq.heappush(steps, ((less - loss) / (more - rate), group))

    for group in range(len(hulls)):
        offer(group)
    while steps:
        _, group = heapq.heappop(steps)
        hull, at = hulls[group], chosen[group]
        extra = options[group][hull[at + 1]][0] - options[group][hull[at]][0]
        if used + extra <= budget:  # else this group is done, and smaller ones may still fit
            used += extra
            chosen[group] += 1
            offer(group)
    return [hull[at] for hull, at in zip(hulls, chosen, strict=True)]


def _hull(points: Sequence[Point]) -> list[int]:
    """List the points on the lower convex hull, until the loss no longer falls."""
    hull: list[int] = []
    for place in sorted(range(len(points)), key=lambda i: points[i]):
        rate, loss = points[place]
        if hull and loss >= points[hull[-1]][1]:
            continue
        while len(hull) > 1:
            (r0, l0), (r1, l1) = points[hull[-2]], points[hull[-1]]
            if (l1 - l0) * (rate - r1) < (loss - l1) * (r1 - r0):
                break
            hull.pop()
        hull.append(place)
    return hull
