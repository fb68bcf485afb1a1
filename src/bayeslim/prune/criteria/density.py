"""The posterior density at zero.

    weight  −log q(0) = μ²/2σ² + log σ + ½ log 2π
    unit    −log q_S(0) = ½ μ_Sᵀ Σ_SS⁻¹ μ_S + ½ log|Σ_SS| + |S|/2 log 2π
    across particles: −log (1/S) Σ_s N(0 | t_s, h²), a kernel density at zero with h = 1.06 σ_t S^(−1/5), where t_s is
    the weight, or the position t_s = w_sᵀ w̄ / ‖w̄‖ of a unit along its mean

A mixture's density at zero is that of its components, mixed.

Silverman 1986, Density estimation, §3.4
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayeslim.posteriors import Mixture, Particles, Posterior, group_saliency
from bayeslim.posteriors.particles import spread_of
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.prune.criteria.base import Criterion, register_criterion
from bayeslim.prune.criteria.group_log_det import group_log_det, random_groups
from bayeslim.prune.criteria.marginals import HALF_LOG_2PI, marginals, minus_log_density_at_zero
from bayeslim.prune.criteria.mixtures import mixed_units, mixed_weights
from bayeslim.prune.criteria.particles import normalised, score_each_group
from bayeslim.prune.smaller_kronecker import reduced
from bayeslim.types import Params


def density(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """Score weights by −log q(0)."""
    if isinstance(posterior, Particles):
        return {name: kernel_density(values) for name, values in posterior.values.items()}
    if isinstance(posterior, Mixture):
        return mixed_weights(posterior, [density(component, priors) for component in posterior.components])
    return {name: minus_log_density_at_zero(mean, std) for name, (mean, std) in marginals(posterior).items()}


def unit_density(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """Score units by −log q_S(0)."""
    if isinstance(posterior, Particles):
        return score_each_group(posterior, groups, lambda w: kernel_density(w @ normalised(w.mean(0))))
    if isinstance(posterior, Mixture):
        return mixed_units(posterior, [unit_density(component, priors, groups) for component in posterior.components])
    posterior, groups = reduced(posterior, groups)
    random = random_groups(posterior, groups)
    sizes = torch.tensor([sum(len(i) for i in group.values()) for group in random], dtype=torch.float64)
    return group_saliency(posterior, groups) + 0.5 * group_log_det(posterior, random) + HALF_LOG_2PI * sizes


def kernel_density(values: Tensor) -> Tensor:
    """Compute −log of the kernel density of values (S, ...) at zero.

    The bandwidth follows Silverman's rule.

    Values that are all equal are a point mass.
    """
    values, count = values.double(), len(values)
    std = spread_of(values)
    width = 1.06 * std * count**-0.2
    log_each = -0.5 * (values / width).square() - width.log() - HALF_LOG_2PI
    point = torch.where(values[0] == 0, -torch.inf, torch.inf)
    return torch.where(std == 0, point, math.log(count) - log_each.logsumexp(0))


DENSITY = register_criterion(Criterion("density", density, unit_density))
