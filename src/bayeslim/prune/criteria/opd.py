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
from functools import singledispatch

import torch
from torch import Tensor

from bayeslim.posteriors import Conditioned, Dense, Diagonal, Kronecker, LowRank, Posterior
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.prune.criteria.base import Criterion, register_criterion
from bayeslim.types import Params


@singledispatch
def precision_diagonal(posterior: Posterior) -> Params:
    """Compute the diagonal of the posterior precision by name.

    It is infinite for weights that are points. Register new posteriors here.
    """
    raise TypeError(
        f"opd ranks by the precision of a Gaussian posterior. Got {type(posterior).__name__}. Use "
        'criterion="magnitude", or bl.Laplace().'
    )


@precision_diagonal.register
def _(posterior: Diagonal) -> Params:
    return {name: std.double().square().reciprocal() for name, std in posterior.std.items()}


@precision_diagonal.register
def _(posterior: Kronecker) -> Params:
    return posterior.ordered(
        [block.layer.params(block.precision_diagonal) for block in posterior.blocks],
        {name: precision.double() for name, precision in posterior.rest.items()},
    )


@precision_diagonal.register
def _(posterior: Dense) -> Params:
    found, random = posterior.scatter(posterior.precision.diagonal()), posterior.support
    return {name: value.masked_fill(~random[name], torch.inf) for name, value in found.items()}


@precision_diagonal.register
def _(posterior: LowRank) -> Params:
    return posterior.layout.params(posterior.root.square().sum(1) + posterior.prior)


@precision_diagonal.register
def _(posterior: Conditioned) -> Params:
    return precision_diagonal(posterior.base)  # the diagonal of P_RR is that of P


def opd(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """Score weights by ½ P_ii μ_i²."""
    precision = precision_diagonal(posterior)
    found = {}
    for name, mean in posterior.mean.items():
        value = 0.5 * precision[name].double() * mean.double().square()
        found[name] = torch.where(mean == 0, 0.0, value)
    return found


def unit_opd(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """Score units by the sum of the scores of their weights."""
    single = {name: value.flatten() for name, value in opd(posterior, priors).items()}
    costs = [sum(float(single[name][i.to(single[name].device)].sum()) for name, i in g.items()) for g in groups]
    return torch.tensor(costs, dtype=torch.float64)


OPD = register_criterion(Criterion("opd", opd, unit_opd, additive=True))
