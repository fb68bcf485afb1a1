"""Optimal posterior damage: the log-density lost by setting a weight to zero while the others stay.

    weight  ½ P_ii μ_i²         unit  ½ Σ_(i in S) P_ii μ_i²          P = H + δ, the posterior precision

It is optimal brain damage (LeCun, Denker & Solla 1990) with the prior precision added to the curvature, so that weights
with a large prior precision of their own (`bnn.fit(loader, tune="online", per="weight")`) are compared as the posterior
sees them. The diagonal of P is at hand, where `curvature` needs that of P⁻¹. The two agree for a diagonal posterior.
The paper leaves out the factor ½, which does not change the ranking.

Dhahri, Immer, Charpentier, Günnemann & Fortuin 2024, arXiv:2402.15978
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayeslim.posteriors import Diagonal, Gaussian, Posterior
from bayeslim.posteriors.precision import precision_diagonal
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.prune.criteria.base import Criterion, register_criterion
from bayeslim.types import Params


def opd(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """Score weights by ½ P_ii μ_i²."""
    if not isinstance(posterior, (Diagonal, Gaussian)):
        raise TypeError(
            f"opd ranks by the precision of a Gaussian posterior. Got {type(posterior).__name__}. Use "
            'criterion="magnitude", or bl.Laplace().'
        )
    precision, means = precision_diagonal(posterior), posterior.mean
    return {n: torch.where(mean == 0, 0.0, 0.5 * precision[n] * mean.double().square()) for n, mean in means.items()}


def unit_opd(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """Score units by the sum of the scores of their weights."""
    single = {name: value.flatten() for name, value in opd(posterior, priors).items()}
    costs = [sum(float(single[name][i.to(single[name].device)].sum()) for name, i in g.items()) for g in groups]
    return torch.tensor(costs, dtype=torch.float64)


OPD = register_criterion(Criterion("opd", opd, unit_opd, additive=True))
