"""The criteria by name. A new one is a function of posterior and priors, and a line here.

    CRITERIA["mine"] = Criterion("mine", my_weight_scores, my_unit_scores)

A function that gives scores for single weights can also be passed to `plan` as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import TypeAlias

from torch import Tensor

from bayeslim.errors import closest
from bayeslim.posteriors import Diagonal, Gated, Gaussian, Mixture, Particles, Posterior
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.prune import gate_score, score, unit_score
from bayeslim.types import Params

WeightScores: TypeAlias = Callable[[Posterior, Mapping[str, Prior]], Params]
UnitScores: TypeAlias = Callable[[Posterior, Mapping[str, Prior], Sequence[Group]], Tensor]


@dataclass(frozen=True)
class Criterion:
    """How much the posterior wants weights to stay; higher = keep.

    Attributes:
        name: what a plan calls it.
        weights: the scores of all single weights, by parameter name.
        units: the scores of groups of weights; None if the criterion has no meaning for them.
        additive: whether scores are costs that add up. Units are then ranked by the cost of each weight that goes with
            them, which is what a budget of weights is best spent on.
    """

    name: str
    weights: WeightScores
    units: UnitScores | None = None
    additive: bool = False


CRITERIA: dict[str, Criterion] = {
    criterion.name: criterion
    for criterion in (
        Criterion("magnitude", score.magnitude, unit_score.unit_magnitude),
        Criterion("snr", score.snr, unit_score.unit_snr),
        Criterion("curvature", score.curvature, unit_score.unit_curvature, additive=True),
        Criterion("density", score.density, unit_score.unit_density),
        Criterion("mass", score.mass, unit_score.unit_mass),
        Criterion("log_alpha", score.log_alpha),
        Criterion("savage_dickey", score.savage_dickey, unit_score.unit_savage_dickey, additive=True),
        Criterion("sign_stability", score.sign_stability, unit_score.unit_sign_stability),
        Criterion("gates", gate_score.gates, gate_score.unit_gates),
    )
}
"""Criteria by name; a new one is added here."""


@singledispatch
def default_criterion(posterior: Posterior, units: bool) -> str:
    """What `criterion="auto"` stands for, for weights or for units; register new posteriors here."""
    return "magnitude" if units else "snr"


@default_criterion.register
def _(posterior: Gated, units: bool) -> str:
    return "gates" if units else "snr"


@default_criterion.register
def _(posterior: Diagonal, units: bool) -> str:
    return "curvature" if units else "snr"


@default_criterion.register
def _(posterior: Gaussian, units: bool) -> str:
    return "curvature"


@default_criterion.register
def _(posterior: Mixture, units: bool) -> str:
    return "density"


@default_criterion.register
def _(posterior: Particles, units: bool) -> str:
    return "magnitude"  # draws of one chain are often too alike to tell their spread, which other scores divide by


def find_criterion(criterion: str | Criterion | WeightScores, posterior: Posterior, units: bool) -> Criterion:
    """The criterion that is meant by a name, a function or itself, for weights or for units."""
    if isinstance(criterion, Criterion):
        return criterion
    if callable(criterion):
        inner = getattr(criterion, "func", criterion)
        return Criterion(getattr(inner, "__name__", type(inner).__name__), criterion)
    name = default_criterion(posterior, units) if criterion == "auto" else criterion
    if name not in CRITERIA:
        hint = closest(str(name), CRITERIA)
        raise ValueError(
            f'criterion must be "auto", one of {", ".join(CRITERIA)}, or a function of posterior and priors. '
            f"Got {criterion!r}.{f' Closest: {hint}.' if hint else ''}"
        )
    return CRITERIA[name]
