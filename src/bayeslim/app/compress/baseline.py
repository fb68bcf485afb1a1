"""The baseline beside every result: the same network, cut to the same budget in the same steps by magnitude.

Nothing is conditioned: the surviving weights keep their values, and are fine-tuned as the others are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from bayeslim.bayesian import Bayesian, bayesianize
from bayeslim.errors import BayeslimError
from bayeslim.methods.base import Method
from bayeslim.posteriors import Diagonal
from bayeslim.priors import Normal
from bayeslim.prune import Budget, Plan, compact, plan, prune
from bayeslim.types import Inputs

SAME_BUDGET = ("sparsity", "parameters", "flops", "bytes")
"""Goals that mean the same for every criterion."""


class NoBaseline(BayeslimError):
    """Magnitude cannot meet the budget."""


@dataclass(frozen=True)
class Point(Method):
    """A point mass at the weights, which conditioning on zeros does not move."""

    name: ClassVar[str] = "point"

    def posterior(self, bnn: Bayesian) -> Diagonal:
        """Return a point mass at the network's weights."""
        mean = {name: bnn.model.get_parameter(name).detach() for name in bnn.sites.names}
        return Diagonal(mean, {name: torch.zeros_like(value) for name, value in mean.items()})


def by_magnitude(
    bnn: Bayesian,
    pruned: Bayesian,
    budget: Budget | Plan | None,
    granularity: str,
    steps: int,
    example: Inputs,
    train: Iterable[Any],
    fine_tune: Mapping[str, Any] | None,
) -> nn.Module:
    """Prune by magnitude to the same budget in as many steps, and compact.

    Where the goal depends on the criterion, magnitude cuts as many weights as `pruned` has lost.

    Raises:
        NoBaseline: if magnitude cannot meet the budget.
    """
    normal = all(isinstance(prior, Normal) for prior in bnn.priors.values())
    point = bayesianize(
        bnn.mean_network(),
        Point(),
        likelihood=bnn.likelihood,
        prior={_exactly(name): prior for name, prior in bnn.priors.items()} if normal else None,
        sites=[_exactly(name) for name in bnn.sites.names],
        num_data=bnn.num_data,
    )
    point.masks = dict(bnn.masks)
    goal = _same(budget, pruned.plan_)
    options: dict[str, Any] = {"granularity": granularity, "criterion": "magnitude", "example": example}
    try:
        cut = prune(point, plan(point, **options)) if goal is None else prune(point, goal, steps=steps, **options)
    except ValueError as error:
        raise NoBaseline(str(error)) from error
    if fine_tune is not None:
        cut.fit(train, **fine_tune)
    return compact(cut, example)


def _same(budget: Budget | Plan | None, done: Plan) -> Budget | None:
    """Choose the budget for magnitude: the same goal, or else the same sparsity."""
    if budget is None:
        return None
    if isinstance(budget, Budget) and budget.goal in SAME_BUDGET:
        return replace(budget, empty_layers="keep best")
    if isinstance(budget, Plan):
        return Budget(sparsity=done.sparsity, empty_layers="keep best")
    return Budget(sparsity=done.sparsity, scope=budget.scope, protect=budget.protect, empty_layers="keep best")


def _exactly(name: str) -> re.Pattern[str]:
    """Build a regular expression that matches this name alone."""
    return re.compile(re.escape(name))
