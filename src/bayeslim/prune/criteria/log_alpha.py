"""The dropout rate of Sparse VD.

    weight  −log α,  α = σ² / μ²        Sparse VD cuts at log α > 3: a threshold of −3

Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369
"""

from __future__ import annotations

from collections.abc import Mapping

from bayeslim.posteriors import Posterior
from bayeslim.priors import Prior
from bayeslim.prune.criteria.base import Criterion, register_criterion
from bayeslim.prune.criteria.marginals import marginals, signal_to_noise
from bayeslim.types import Params


def log_alpha(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """Score weights by −log α = log μ²/σ²."""
    return {name: 2 * signal_to_noise(mean, std).log() for name, (mean, std) in marginals(posterior).items()}


LOG_ALPHA = register_criterion(Criterion("log_alpha", log_alpha))
