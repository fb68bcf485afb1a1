"""Pruning criteria, one file each: scores that say how much a posterior wants weights or units to stay."""

from __future__ import annotations

from bayeslim.prune.criteria import (
    bmrs,
    curvature,
    density,
    gates,
    log_alpha,
    magnitude,
    mass,
    opd,
    savage_dickey,
    sign_stability,
    snr,
)
from bayeslim.prune.criteria.base import CRITERIA, Criterion, UnitScores, WeightScores, register_criterion
from bayeslim.prune.criteria.choice import default_criterion, find_criterion

__all__ = [
    "CRITERIA",
    "Criterion",
    "UnitScores",
    "WeightScores",
    "bmrs",
    "curvature",
    "default_criterion",
    "density",
    "find_criterion",
    "gates",
    "log_alpha",
    "magnitude",
    "mass",
    "opd",
    "register_criterion",
    "savage_dickey",
    "sign_stability",
    "snr",
]
