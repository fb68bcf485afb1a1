"""Warnings of cuts block by block that are smaller than they look, or than was asked for."""

from __future__ import annotations

import warnings

from bayeslim.errors import BayeslimWarning
from bayeslim.prune.budget import Budget
from bayeslim.prune.plan import Plan
from bayeslim.prune.streaming.block_cut import Cutting, protected

MAX_REST = 0.25
"""A larger part of the blocks that stays gives a warning."""


def warn_of_the_budget(plan: Plan, budget: Budget | None) -> None:
    """Warn if less than half of the budget was cut, or twice as much was left.

    A layer loses whole weights or units, and keeps at least one: few weights do not meet every fraction.
    """
    if budget is None or (2 * plan.sparsity >= budget.value and 1 - plan.sparsity <= 2 * (1 - budget.value)):
        return
    warnings.warn(
        f"{budget!r} was asked for, and the layers reached a sparsity of {plan.sparsity:.6g}: each loses whole weights "
        "or units, and keeps at least one. Ask for a fraction that layers of this size can lose.",
        BayeslimWarning,
        stacklevel=3,
    )


def warn_of_the_rest(plan: Plan, cutting: Cutting) -> None:
    """Warn if much of the blocks was neither cut nor protected."""
    chosen = protected(cutting)
    sizes = {n: p.numel() for n, p in cutting.model.named_parameters()}
    rest = {n: sizes[n] for n in plan.left if n in sizes and n not in chosen and n not in plan.masks}
    total = sum(rest.values()) + sum(sizes[n] for n in plan.masks)
    if sum(rest.values()) > MAX_REST * total:
        largest = max(rest, key=lambda n: rest[n])
        warnings.warn(
            f"{sum(rest.values()):,} of {total:,} parameters of the blocks stay as they are, so that the network is "
            f"less sparse than the plan says of its layers. The largest: {largest}, because {plan.left[largest]}. "
            "Print the plan for all of them, or protect them.",
            BayeslimWarning,
            stacklevel=3,
        )
