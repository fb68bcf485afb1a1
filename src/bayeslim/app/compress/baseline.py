"""The baseline that stands beside every result: the same network, cut as far by plain magnitude.

Nothing is conditioned: the weights that stay keep their values, and are fine-tuned as the others are.
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
    """All belief in the weights as they are: a point mass, which conditioning on zeros does not move."""

    name: ClassVar[str] = "point"

    def posterior(self, bnn: Bayesian) -> Diagonal:
        """A point mass at the network's weights."""
        mean = {name: bnn.model.get_parameter(name).detach() for name in bnn.sites.names}
        return Diagonal(mean, {name: torch.zeros_like(value) for name, value in mean.items()})


def by_magnitude(
    bnn: Bayesian,
    pruned: Bayesian,
    budget: Budget | Plan | None,
    granularity: str,
    example: Inputs,
    train: Iterable[Any],
    fine_tune: Mapping[str, Any] | None,
) -> nn.Module:
    """The compacted network that magnitude leaves, at the same budget.

    Args:
        bnn: the network before the cut.
        pruned: the one after it, for goals that depend on the criterion: then magnitude cuts as many weights.
        budget: how much to cut.
        granularity: what is cut.
        example: inputs.
        train: data to fine-tune on.
        fine_tune: options of training, or None for no fine-tuning.

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
    try:
        chosen = plan(point, goal, granularity=granularity, criterion="magnitude", example=example)
    except ValueError as error:
        raise NoBaseline(str(error)) from error
    cut = prune(point, chosen)
    if fine_tune is not None:
        cut.fit(train, **fine_tune)
    return compact(cut, example)


def _same(budget: Budget | Plan | None, done: Plan) -> Budget | None:
    """The budget for magnitude: the same goal, or else the same sparsity."""
    if budget is None:
        return None
    if isinstance(budget, Budget) and budget.goal in SAME_BUDGET:
        return replace(budget, empty_layers="keep best")
    if isinstance(budget, Plan):
        return Budget(sparsity=done.sparsity, empty_layers="keep best")
    return Budget(sparsity=done.sparsity, scope=budget.scope, protect=budget.protect, empty_layers="keep best")


def _exactly(name: str) -> re.Pattern[str]:
    """A selection of the parameter with this name, which is also a regular expression."""
    return re.compile(re.escape(name))
