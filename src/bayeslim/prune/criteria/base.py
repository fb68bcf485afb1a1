"""A criterion, and the criteria by name.

A new criterion is a file that scores single weights, and units if it can, and registers both:

    register_criterion(Criterion("mine", my_weight_scores, my_unit_scores))

A function that scores single weights can also be passed to `bayeslim.plan` without a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from bayeslim.io.registry import entered, register, unregister
from bayeslim.posteriors import Posterior
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.types import Params

WeightScores: TypeAlias = Callable[[Posterior, Mapping[str, Prior]], Params]
"""Scores of all single weights, by parameter name, from a posterior and the priors."""
UnitScores: TypeAlias = Callable[[Posterior, Mapping[str, Prior], Sequence[Group]], Tensor]
"""One score for each group of weights."""


@dataclass(frozen=True)
class Criterion:
    """How much the posterior wants weights to stay; higher = keep.

    Attributes:
        name: the name that plans and users call it by.
        weights: the scores of all single weights, by parameter name.
        units: the scores of groups of weights; None if the criterion has no meaning for them.
        additive: whether scores are costs that add up. Units are then ranked by the cost of each weight that goes with
            them, so that a budget of weights is spent where it costs least.
    """

    name: str
    weights: WeightScores
    units: UnitScores | None = None
    additive: bool = False

    def __call__(self, posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
        """Score single weights."""
        return self.weights(posterior, priors)


CRITERIA: Mapping[str, Criterion] = entered("criterion")
"""The registered criteria by name: a view that shows later additions too."""


def register_criterion(criterion: Criterion) -> Criterion:
    """Make a criterion known by its name, and return it.

    Raises:
        ValueError: if another criterion has the name.
    """
    name, other = criterion.name, CRITERIA.get(criterion.name)
    if name == "auto" or (other is not None and _origin(other) != _origin(criterion)):
        raise ValueError(f'There is a criterion "{name}" already. Give yours another name.')
    unregister("criterion", name)
    return register("criterion", name)(criterion)


def _origin(criterion: Criterion) -> tuple[str | None, str]:
    function = criterion.weights
    return getattr(function, "__module__", None), getattr(function, "__qualname__", repr(function))
