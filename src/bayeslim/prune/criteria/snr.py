"""Signal to noise.

    weight  |μ| / σ             unit  √(μ_Sᵀ Σ_SS⁻¹ μ_S)
    unit across particles: ‖w̄‖ / √tr Cov(w), the norm of the mean against that of the spread

It ranks weights as `curvature`, `log_alpha` and `sign_stability` do; they differ in what a threshold means.

Graves 2011 · Blundell et al. 2015, arXiv:1505.05424
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayeslim.posteriors import Particles, Posterior
from bayeslim.posteriors.particles import spread_of
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.prune.criteria.base import Criterion, register_criterion
from bayeslim.prune.criteria.curvature import unit_curvature
from bayeslim.prune.criteria.marginals import marginals, signal_to_noise
from bayeslim.prune.criteria.particles import score_each_group
from bayeslim.types import Params


def snr(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """Score weights by |μ| / σ."""
    return {name: signal_to_noise(mean, std) for name, (mean, std) in marginals(posterior).items()}


def unit_snr(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """Score units by √(μ_Sᵀ Σ_SS⁻¹ μ_S)."""
    if isinstance(posterior, Particles):
        return score_each_group(posterior, groups, _across_networks)
    return (2 * unit_curvature(posterior, priors, groups)).sqrt()


def _across_networks(weights: Tensor) -> Tensor:
    signal = weights.mean(0).norm()
    return torch.where(signal == 0, 0.0, signal / spread_of(weights).norm())


SNR = register_criterion(Criterion("snr", snr, unit_snr))
