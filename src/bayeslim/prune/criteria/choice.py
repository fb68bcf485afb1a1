"""The choice of a criterion: by name, as a function, or the default of a posterior."""

from __future__ import annotations

from functools import singledispatch

from bayeslim.errors import closest
from bayeslim.posteriors import Diagonal, Gated, Gaussian, Mixture, Particles, Posterior, ZeroMeanDiagonal
from bayeslim.prune.criteria.base import CRITERIA, Criterion, WeightScores

NEED_A_MEAN = ("curvature", "log_alpha", "magnitude", "opd", "sign_stability", "snr")
"""Criteria that give weights with mean zero the same score, whatever their spread."""


@singledispatch
def default_criterion(posterior: Posterior, units: bool) -> str:
    """Name the criterion that "auto" stands for; register new posteriors here."""
    return "magnitude" if units else "snr"


@default_criterion.register
def _(posterior: Gated, units: bool) -> str:
    return "gates" if units else "snr"


@default_criterion.register
def _(posterior: Diagonal, units: bool) -> str:
    return "curvature" if units else "snr"


@default_criterion.register
def _(posterior: ZeroMeanDiagonal, units: bool) -> str:
    return "density"


@default_criterion.register
def _(posterior: Gaussian, units: bool) -> str:
    return "curvature"


@default_criterion.register
def _(posterior: Mixture, units: bool) -> str:
    return "density"


@default_criterion.register
def _(posterior: Particles, units: bool) -> str:
    return "magnitude"  # draws of one chain are often so alike that their spread, the divisor of snr, is unreliable


def find_criterion(criterion: str | Criterion | WeightScores, posterior: Posterior, units: bool) -> Criterion:
    """Find the criterion of a name or a function, for weights or units."""
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
    if isinstance(posterior, ZeroMeanDiagonal) and name in NEED_A_MEAN:
        raise TypeError(
            f'criterion="{name}" ranks by the means, and those of families.ZeroMean() are all zero. Use "density", '
            '"mass" or "savage_dickey", which rank by the spreads.'
        )
    return CRITERIA[name]
