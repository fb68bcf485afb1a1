"""The probability mass around zero.

    weight  −log P(|w| < ε)             unit  −log P(all |w| < ε), a sum where weights are independent
    across particles: −log of the fraction of networks in which the weight, or the root mean square of the unit's
    weights, is below ε

A mixture's mass around zero is that of its components, mixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayeslim.posteriors import Diagonal, Gated, Mixture, Particles, Posterior
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.prune.criteria.base import Criterion, register_criterion
from bayeslim.prune.criteria.marginals import marginals, minus_log_density_at_zero
from bayeslim.prune.criteria.mixtures import mixed_units, mixed_weights
from bayeslim.prune.criteria.particles import score_each_group
from bayeslim.prune.smaller_kronecker import reduced
from bayeslim.types import Params

DEFAULT_EPSILON = 0.01
"""Weights smaller than this count as zero, unless the user says otherwise."""
MAX_NARROW_RATIO = 1e-4
"""Below this ε/σ the Gaussian is exponential over (−ε, ε) to a relative 1e-8."""


def mass(posterior: Posterior, priors: Mapping[str, Prior], epsilon: float = DEFAULT_EPSILON) -> Params:
    """Score weights by −log P(|w| < ε), accurately in the tails and for a small ε.

    Args:
        posterior: over the weights.
        priors: not used.
        epsilon: weights smaller than this count as zero; for another value pass `functools.partial(mass, epsilon=...)`
            as the criterion.
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be a positive number. Got {epsilon}.")
    if isinstance(posterior, Particles):
        return {name: near_zero(values, epsilon) for name, values in posterior.values.items()}
    if isinstance(posterior, Mixture):
        return mixed_weights(posterior, [mass(component, priors, epsilon) for component in posterior.components])
    return {name: _minus_log_mass(mean, std, epsilon) for name, (mean, std) in marginals(posterior).items()}


def unit_mass(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """Score units by −log P(all |w| < ε)."""
    if isinstance(posterior, Particles):
        return score_each_group(posterior, groups, lambda w: near_zero(w.square().mean(1).sqrt(), DEFAULT_EPSILON))
    if isinstance(posterior, Mixture):
        return mixed_units(posterior, [unit_mass(component, priors, groups) for component in posterior.components])
    posterior, groups = reduced(posterior, groups) if isinstance(posterior, Gated) else (posterior, groups)
    if not isinstance(posterior, Diagonal):
        raise TypeError(
            "The probability that all weights of a unit are near zero has a closed form only for independent weights. "
            f'Got a {type(posterior).__name__} posterior: use criterion="curvature" or "density".'
        )
    single = {name: value.flatten() for name, value in mass(posterior, priors).items()}
    return torch.tensor([sum(float(single[n][i].sum()) for n, i in group.items()) for group in groups])


def near_zero(values: Tensor, epsilon: float) -> Tensor:
    """Compute −log of the fraction of values (S, ...) that lie within ε of zero."""
    return -(values.abs() < epsilon).double().mean(0).log()


def _minus_log_mass(mean: Tensor, std: Tensor, epsilon: float) -> Tensor:
    centre = mean.abs()
    upper, lower = (epsilon - centre) / std, (-epsilon - centre) / std
    # Around zero P is near one, so that 1 − P is the accurate quantity. In the tail, log P is.
    outside = (torch.erfc(upper / math.sqrt(2)) + torch.erfc(-lower / math.sqrt(2))) / 2
    inside = torch.log1p(-outside)
    log_upper = torch.special.log_ndtr(upper)
    tail = log_upper + torch.log(-torch.expm1(torch.special.log_ndtr(lower) - log_upper))
    # ∫ exp(wμ/σ²) dw over (−ε, ε) = 2ε · sinh(t)/t with t = εμ/σ²
    tilt = epsilon * centre / std.square()
    log_sinhc = torch.where(tilt < 1e-4, tilt.square() / 6, tilt + torch.log(-torch.expm1(-2 * tilt) / (2 * tilt)))
    narrow = math.log(2 * epsilon) + log_sinhc - minus_log_density_at_zero(mean, std)
    log_mass = torch.where(epsilon < MAX_NARROW_RATIO * std, narrow, torch.where(upper > 1, inside, tail))
    point = torch.where(centre < epsilon, 0.0, -torch.inf)
    return -torch.where(std == 0, point, log_mass)


MASS = register_criterion(Criterion("mass", mass, unit_mass))
