"""Curvature: the log-density lost by the best point with the weights at zero, the optimal-brain-surgeon saliency.

    weight  μ² / 2σ²            unit  ½ μ_Sᵀ Σ_SS⁻¹ μ_S,  from the joint marginal of all weights that go with the unit

Hassibi & Stork 1993
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from bayeslim.posteriors import Particles, Posterior, group_saliency
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.prune.criteria.base import Criterion, register_criterion
from bayeslim.prune.criteria.marginals import marginals, signal_to_noise
from bayeslim.prune.smaller_kronecker import reduced
from bayeslim.types import Params


def curvature(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """Score weights by μ² / 2σ²."""
    return {name: signal_to_noise(mean, std).square() / 2 for name, (mean, std) in marginals(posterior).items()}


def unit_curvature(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """Score units by ½ μ_Sᵀ Σ_SS⁻¹ μ_S."""
    if isinstance(posterior, Particles):
        raise TypeError(
            f"{posterior.count} particles do not determine how all the weights of a unit vary together. "
            'Use criterion="snr", "density", "mass", "sign_stability" or "magnitude".'
        )
    return group_saliency(*reduced(posterior, groups))


CURVATURE = register_criterion(Criterion("curvature", curvature, unit_curvature, additive=True))
