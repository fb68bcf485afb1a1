"""Magnitude, the baseline that uses no uncertainty.

    weight  |μ|                 unit  ‖μ_S‖
    across particles: (1/S) Σ_s |w_s| and (1/S) Σ_s ‖w_s‖, since the means of several modes cancel

LeCun, Denker & Solla 1990 (as the baseline) · Han et al. 2015, arXiv:1506.02626
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayeslim.posteriors import Particles, Posterior
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.prune.criteria.base import Criterion, register_criterion
from bayeslim.prune.criteria.particles import score_each_group
from bayeslim.types import Params


def magnitude(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """Score weights by |μ|."""
    if isinstance(posterior, Particles):
        return {name: values.double().abs().mean(0) for name, values in posterior.values.items()}
    return {name: mean.double().abs() for name, mean in posterior.mean.items()}


def unit_magnitude(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """Score units by ‖μ_S‖."""
    if isinstance(posterior, Particles):
        return score_each_group(posterior, groups, lambda w: w.norm(dim=1).mean())
    squares = {name: mean.double().square().flatten() for name, mean in posterior.mean.items()}
    return torch.tensor([math.sqrt(sum(float(squares[n][i].sum()) for n, i in group.items())) for group in groups])


MAGNITUDE = register_criterion(Criterion("magnitude", magnitude, unit_magnitude))
