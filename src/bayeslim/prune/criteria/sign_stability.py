"""How certain the side of zero is on which a weight lies.

weight  |E sign w| = erf(|μ| / √2 σ)
across particles: ‖(1/S) Σ_s w_s / ‖w_s‖‖ of a weight or a unit, 1 if all networks agree on the sign (direction)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayeslim.posteriors import Mixture, Particles, Posterior
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.prune.criteria.base import Criterion, register_criterion
from bayeslim.prune.criteria.marginals import marginals, signal_to_noise
from bayeslim.prune.criteria.particles import normalised, score_each_group
from bayeslim.types import Params


def sign_stability(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """Score weights by |E sign w|."""
    if isinstance(posterior, Particles):
        return {name: values.sign().double().mean(0).abs() for name, values in posterior.values.items()}
    if isinstance(posterior, Mixture):
        each = [_mean_signs(component) for component in posterior.components]
        weights = posterior.weights.tolist()
        return {
            name: torch.stack([w * signs[name] for w, signs in zip(weights, each, strict=True)]).sum(0).abs()
            for name in each[0]
        }
    return {name: sign.abs() for name, sign in _mean_signs(posterior).items()}


def unit_sign_stability(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """Score units of particles by the length of their mean direction."""
    if not isinstance(posterior, Particles):
        raise TypeError(
            "The stability of the direction of a unit's weights has a closed form for particles only. "
            f'Got a {type(posterior).__name__} posterior: use criterion="snr".'
        )
    return score_each_group(posterior, groups, lambda w: normalised(w).mean(0).norm())


def _mean_signs(posterior: Posterior) -> Params:
    """Compute E sign w of Gaussian marginals."""
    return {
        name: mean.sign() * torch.erf(signal_to_noise(mean, std) / math.sqrt(2))
        for name, (mean, std) in marginals(posterior).items()
    }


SIGN_STABILITY = register_criterion(Criterion("sign_stability", sign_stability, unit_sign_stability))
