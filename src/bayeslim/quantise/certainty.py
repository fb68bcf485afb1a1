"""The diagonal of the posterior precision: the price of rounding each weight alone.

Rounding by independent errors δ costs E ½ δᵀ P δ = ½ Σ P_ii E δ_i² nats. So the price is the diagonal of the
*precision*: 1/σ² where weights are independent, and more where they are correlated, since the others stay in place.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from bayeslim.posteriors import (
    Conditioned,
    Dense,
    Kronecker,
    LowRank,
    LowRankCovariance,
    Mixture,
    Particles,
    Posterior,
)
from bayeslim.types import Params


@singledispatch
def precision_of(posterior: Posterior) -> Params:
    """Compute the diagonal of the precision by name; infinite for point masses."""
    return {name: variance.double().reciprocal() for name, variance in posterior.variance.items()}


@precision_of.register
def _(posterior: Kronecker) -> Params:
    blocks = [block.layer.params(block.precision_diagonal) for block in posterior.blocks]
    found: Params = dict(posterior.rest)
    for block in blocks:
        found |= block
    return {name: found[name].double() for name in posterior.mean}


@precision_of.register
def _(posterior: Dense) -> Params:
    return _or_infinite(posterior.scatter(posterior.precision.diagonal().double()), posterior.support)


@precision_of.register
def _(posterior: LowRank) -> Params:
    return posterior.layout.params(posterior.root.double().square().sum(1) + posterior.prior.double())


@precision_of.register
def _(posterior: LowRankCovariance) -> Params:
    """Compute the diagonal of diag(σ)⁻¹ (I − Bᵀ M⁻¹ B) diag(σ)⁻¹."""
    explained = torch.linalg.solve_triangular(posterior.root, posterior.scaled, upper=False).square().sum(0)
    return posterior.layout.params((1 - explained) / posterior.sigma.square())


@precision_of.register
def _(posterior: Conditioned) -> Params:
    return _or_infinite(precision_of(posterior.base), posterior.support)


@precision_of.register(Mixture)
@precision_of.register(Particles)
def _(posterior: Posterior) -> Params:
    raise TypeError(
        f"quantise needs a posterior around one network, and {type(posterior).__name__} holds several. Distil "
        "them into one (bl.distill), or fit bl.Laplace() around one of them."
    )


def _or_infinite(precision: Params, support: Params) -> dict[str, Tensor]:
    return {name: value.masked_fill(~support[name], torch.inf) for name, value in precision.items()}
