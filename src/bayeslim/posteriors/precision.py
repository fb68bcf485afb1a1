"""The diagonal of the posterior precision P: the loss of moving one weight while all others stay.

A small move δ of the weights costs ½ δᵀ P δ nats of log-density, that of one weight alone ½ P_ii δ². P_ii is 1/σ² where
weights are independent, more where they are correlated, and unchanged by conditioning, since P_RR is a part of P.
"""

from __future__ import annotations

from functools import singledispatch

import torch

from bayeslim.posteriors.base import Posterior
from bayeslim.posteriors.dense import Dense
from bayeslim.posteriors.gaussian import Conditioned
from bayeslim.posteriors.kronecker import Kronecker
from bayeslim.posteriors.lowrank import LowRank
from bayeslim.posteriors.lowrank_covariance import LowRankCovariance
from bayeslim.types import Params


@singledispatch
def precision_diagonal(posterior: Posterior) -> Params:
    """Compute the diagonal of P by name; infinite for points.

    Register new posteriors here.
    """
    return {name: std.double().square().reciprocal() for name, std in posterior.std.items()}


@precision_diagonal.register
def _(posterior: Kronecker) -> Params:
    blocks = [block.layer.params(block.precision_diagonal) for block in posterior.blocks]
    return {name: value.double() for name, value in posterior.ordered(blocks, posterior.rest).items()}


@precision_diagonal.register
def _(posterior: Dense) -> Params:
    return _or_infinite(posterior.scatter(posterior.precision.diagonal()), posterior)


@precision_diagonal.register
def _(posterior: LowRank) -> Params:
    return posterior.layout.params(posterior.root.square().sum(1) + posterior.prior)


@precision_diagonal.register
def _(posterior: LowRankCovariance) -> Params:
    # that of diag(σ)⁻¹ (I − Bᵀ M⁻¹ B) diag(σ)⁻¹
    explained = torch.linalg.solve_triangular(posterior.root, posterior.scaled, upper=False).square().sum(0)
    return posterior.layout.params((1 - explained) / posterior.sigma.square())


@precision_diagonal.register
def _(posterior: Conditioned) -> Params:
    return _or_infinite(precision_diagonal(posterior.base), posterior)


def _or_infinite(precision: Params, posterior: Dense | Conditioned) -> Params:
    random = posterior.support
    return {name: value.masked_fill(~random[name], torch.inf) for name, value in precision.items()}
