"""Posteriors over the weights that are left of a network.

Removing the weights D from N(μ, P⁻¹) leaves the weights K with the precision P_KK. That is the posterior given w_D, as
conditioning is everywhere in this library. It is also the posterior that the method would find for the smaller network
from the same curvature: the gradients of the kept weights are the same functions in both. Where whole rows and columns
of a layer are removed, P_KK = G_rr ⊗ A_cc + δ I is of Kronecker form again; a dense precision loses rows and columns, a
low-rank one rows of U.

Posteriors that are known by their covariance (independent weights, low-rank covariances, mixtures) keep the covariance
of the kept weights: the removed weights are averaged over. Where all removed weights are known to be zero, the two are
the same. Of particles, each keeps its kept weights.

Where some of the kept weights are zeros (S), the result is N(m, P_KK⁻¹) given w_S = 0. It is centred so that every
further cut gives what it would have given in the whole network: P_KK m = (P μ)_K − P_KD v_D, with v the mean given all
zeros. That is the survivors' rule at the point w_K = μ_K, w_D = μ_D − v_D.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import TypeAlias, cast

import torch
from torch import Tensor

from bayeslim.compact.surgery import sliced
from bayeslim.errors import BayeslimError
from bayeslim.posteriors import (
    Conditioned,
    Dense,
    Diagonal,
    Gaussian,
    Kronecker,
    KroneckerFactors,
    LowRank,
    LowRankCovariance,
    Mixture,
    Particles,
    Posterior,
)
from bayeslim.posteriors import prior_precision as priors
from bayeslim.posteriors.factor import Factor
from bayeslim.posteriors.gaussian import survivors
from bayeslim.posteriors.layer_matrix import LayerMatrix
from bayeslim.posteriors.prior_precision import PriorPrecision
from bayeslim.types import Params

Kept: TypeAlias = Mapping[str, Mapping[int, Tensor]]
"""The indices that stay along each dimension that shrinks, by the name of a parameter or buffer."""


class NotRestrictable(BayeslimError, ValueError):
    """A posterior has no form of its own kind over fewer weights."""


def sliced_setting(value: Tensor, rank: int, dims: Mapping[int, Tensor]) -> Tensor:
    """Slice a tensor that broadcasts to a parameter with `rank` dimensions."""
    own = {dim - rank: places for dim, places in dims.items() if rank - dim <= value.ndim}
    return sliced(value, {dim: places for dim, places in own.items() if value.shape[dim] > 1})


def behind(tensor: Tensor, lead: int, dims: Mapping[int, Tensor]) -> Tensor:
    """Slice a tensor whose dimensions come after `lead` others."""
    return sliced(tensor, {dim + lead: places for dim, places in dims.items()})


@singledispatch
def restricted(posterior: Posterior, kept: Kept, mean: Mapping[str, Tensor]) -> Posterior:
    """Restrict a posterior to the kept weights; register new types of posteriors here.

    Args:
        posterior: the posterior over the whole network.
        kept: the indices that stay.
        mean: the mean of the result, by name.

    Raises:
        NotRestrictable: if no posterior of this kind exists over fewer weights.
    """
    raise NotRestrictable(
        f"A {type(posterior).__name__} posterior cannot be cut to fewer weights. Compact the plain network instead: "
        "compact(network, example)."
    )


@restricted.register
def _(posterior: Diagonal, kept: Kept, mean: Mapping[str, Tensor]) -> Diagonal:
    return Diagonal(mean, {name: sliced(std, kept.get(name, {})) for name, std in posterior.std.items()})


@restricted.register
def _(posterior: Kronecker, kept: Kept, mean: Mapping[str, Tensor]) -> Kronecker:
    factors = []
    for own, block in zip(posterior.factors, posterior.blocks, strict=True):
        shrinks = any(kept.get(name) for name in block.layer.names)
        if shrinks and (own.corrected is not None or posterior.damping != "exact"):
            what = "Corrected eigenvalues" if own.corrected is not None else 'The factors of damping="sqrt"'
            raise NotRestrictable(
                f'{what} belong to the whole of "{own.weight}" and cannot be cut with it. Fit with '
                'Laplace(corrected=False, damping="exact"), or compact the plain network and fit that.'
            )
        factors.append(_part_of_layer(own, block.layer, kept) if shrinks else own)
    rest = {name: sliced(curvature, kept.get(name, {})) for name, curvature in posterior.rest_curvature.items()}
    return Kronecker(mean, factors, _prior(posterior, kept), rest=rest, damping=posterior.damping)


@restricted.register
def _(posterior: Dense, kept: Kept, mean: Mapping[str, Tensor]) -> Dense:
    rows, indices = [], {}
    for name, value in posterior.mean.items():
        if name in posterior.indices:
            left = sliced(torch.arange(value.numel()).view(value.shape), kept.get(name, {})).flatten()
            new = torch.full((value.numel(),), -1)
            new[left] = torch.arange(len(left))
            moved = new[posterior.indices[name].cpu()]
            rows.append(moved >= 0)
            indices[name] = moved[moved >= 0]
    chosen = torch.cat(rows).nonzero()[:, 0].to(posterior.curvature.device)
    return Dense(mean, posterior.curvature[chosen][:, chosen], _prior(posterior, kept), indices=indices)


@restricted.register
def _(posterior: LowRank, kept: Kept, mean: Mapping[str, Tensor]) -> LowRank:
    places = posterior.layout.params(torch.arange(posterior.layout.size, device=posterior.factor.device))
    rows = torch.cat([sliced(place, kept.get(name, {})).flatten() for name, place in places.items()])
    return LowRank(mean, posterior.factor[rows], posterior.eigenvalues, _prior(posterior, kept))


@restricted.register
def _(posterior: LowRankCovariance, kept: Kept, mean: Mapping[str, Tensor]) -> LowRankCovariance:
    std = {name: sliced(value, kept.get(name, {})) for name, value in posterior.own_std.items()}
    return LowRankCovariance(
        mean, std, {name: behind(u, 1, kept.get(name, {})) for name, u in posterior.factor.items()}
    )


@restricted.register
def _(posterior: Mixture, kept: Kept, mean: Mapping[str, Tensor]) -> Mixture:
    means = {name: behind(value, 1, kept.get(name, {})) for name, value in posterior.means.items()}
    for name, centre in posterior.mean.items():
        means[name] = means[name] + (mean[name] - sliced(centre, kept.get(name, {})))
    stds = {name: behind(value, 1, kept.get(name, {})) for name, value in posterior.stds.items()}
    return Mixture(posterior.log_weights, means, stds)


@restricted.register
def _(posterior: Particles, kept: Kept, mean: Mapping[str, Tensor]) -> Particles:
    values, rest = (
        {name: behind(value, 1, kept.get(name, {})) for name, value in tensors.items()}
        for tensors in (posterior.values, posterior.buffers)
    )
    return Particles(values, buffers=rest, chains=posterior.chains, averaged=posterior.averaged)


@restricted.register
def _(posterior: Conditioned, kept: Kept, mean: Mapping[str, Tensor]) -> Posterior:
    masks = {name: sliced(mask, kept.get(name, {})) for name, mask in posterior.masks.items()}
    if all(bool(mask.all()) for mask in masks.values()):
        return restricted(posterior.base, kept, mean)
    base = posterior.base
    stays = {name: _stays(value, kept.get(name, {})) for name, value in posterior.mean.items()}
    start = {name: value - posterior.mean[name] * ~stays[name] for name, value in base.mean.items()}
    centred = survivors(base, base.restrict(stays, posterior.solver), stays, start)
    centre = {}
    for name, value in centred.items():
        own = kept.get(name, {})
        moved = mean[name] - sliced(posterior.mean[name], own)
        centre[name] = (sliced(value, own) + moved).to(base.mean[name].dtype)
    return Conditioned(cast("Gaussian", restricted(base, kept, centre)), masks, mean, posterior.solver)


def _stays(tensor: Tensor, dims: Mapping[int, Tensor]) -> Tensor:
    """Make a mask of the entries that stay."""
    mask = torch.ones_like(tensor, dtype=torch.bool)
    for dim, places in dims.items():
        line = torch.zeros(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
        line[places.to(tensor.device)] = True
        mask &= line.view([-1 if d == dim else 1 for d in range(tensor.ndim)])
    return mask


def _part_of_layer(factors: KroneckerFactors, layer: LayerMatrix, kept: Kept) -> KroneckerFactors:
    """Compute G_rr and A_cc of the kept rows and columns."""
    sizes = {layer.weight: torch.Size(layer.shape)}
    if layer.bias is not None:
        sizes[layer.bias] = torch.Size([layer.size[0] * layer.size[1]])
    numbers: Params = {}
    for name, shape in sizes.items():
        start = sum(value.numel() for value in numbers.values())
        numbers[name] = torch.arange(start, start + shape.numel()).view(shape)
    _, outputs, inputs = layer.size
    place = layer.matrix(numbers).flatten().argsort()
    left = {name: sliced(number, kept.get(name, {})) for name, number in numbers.items()}
    groups = len((place[left[layer.weight]] // (outputs * inputs)).unique())
    small = LayerMatrix(layer.weight, layer.bias, tuple(left[layer.weight].shape), groups, layer.transposed)
    found = place[small.matrix(left)]
    group, output, column = found // (outputs * inputs), found // inputs % outputs, found % inputs
    whole = (group == group[:, :1, :1]) & (output == output[:, :, :1]) & (column == column[:, :1])
    if not bool(whole.all()):
        raise NotRestrictable(
            f'The kept part of "{layer.weight}" is not some rows times some columns of each group, which a Kronecker '
            "posterior needs. Compact the plain network instead: compact(network, example)."
        )
    return KroneckerFactors(
        factors.weight,
        part_of_factor(factors.outputs, group[:, 0, 0], output[:, :, 0]),
        part_of_factor(factors.inputs, group[:, 0, 0], column[:, 0]),
        factors.bias,
        transposed=factors.transposed,
    )


def part_of_factor(factor: Factor, groups: Tensor, places: Tensor) -> Factor:
    """Compute the factor of M[places, places] in some groups, (groups, places)."""
    groups, places = groups.to(factor.values.device), places.to(factor.values.device)
    if factor.vectors is None:
        return Factor(factor.values[groups[:, None], places], None)
    whole = torch.arange(factor.size, device=places.device)
    if places.shape[1] == factor.size and bool((places == whole).all()):
        return Factor(factor.values[groups], factor.vectors[groups])
    return Factor.of(factor.matrix[groups[:, None, None], places[:, :, None], places[:, None, :]])


def _prior(posterior: Kronecker | Dense | LowRank, kept: Kept) -> PriorPrecision:
    """Slice the tensors of a prior precision with their parameters."""
    given, resolved = posterior.prior_precision, priors.resolve(posterior.prior_precision, posterior.mean)
    own = {
        name: sliced_setting(value, posterior.mean[name].ndim, kept.get(name, {}))
        for name, value in resolved.items()
        if value.numel() > 1
    }
    if not own:
        return given
    if not isinstance(given, Mapping):
        return resolved | own
    return {key: value for key, value in given.items() if torch.as_tensor(value).numel() == 1} | own
