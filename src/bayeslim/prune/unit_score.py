"""Scores of units: how much a posterior wants a group of weights S to stay together. Higher = keep.

From the joint marginal q_S = N(μ_S, Σ_SS) of all weights that would go with the unit, never a mean of their scores:

    magnitude       ‖μ_S‖
    snr             √(μ_Sᵀ Σ_SS⁻¹ μ_S)
    curvature       ½ μ_Sᵀ Σ_SS⁻¹ μ_S
    density         −log q_S(0) = ½ μ_Sᵀ Σ_SS⁻¹ μ_S + ½ log|Σ_SS| + |S|/2 log 2π
    savage_dickey   log p_S(0) − log q_S(0)

Weights of the group that are known to be zero (cut before) are left out. A mixture's density at zero, and mass around
it, are those of its components for the whole group, mixed. Scores across particles are in `particle_score`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import singledispatch

import torch
from torch import Tensor

from bayeslim.posteriors import (
    Dense,
    Diagonal,
    Gated,
    Gaussian,
    Kronecker,
    Mixture,
    Particles,
    Posterior,
    group_saliency,
)
from bayeslim.posteriors.kept import KeptBlock
from bayeslim.posteriors.saliency import Group, UnitSaliency
from bayeslim.priors import Prior
from bayeslim.prune import particle_score
from bayeslim.prune.reduced import reduced
from bayeslim.prune.score import log_prior_at_zero, mass, minus_log_mean


def unit_magnitude(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """‖μ_S‖; of particles the mean of ‖w_S‖."""
    if isinstance(posterior, Particles):
        return particle_score.unit_magnitude(posterior, groups)
    squares = {name: mean.double().square().flatten() for name, mean in posterior.mean.items()}
    return torch.tensor([math.sqrt(sum(float(squares[n][i].sum()) for n, i in group.items())) for group in groups])


def unit_snr(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """√(μ_Sᵀ Σ_SS⁻¹ μ_S)."""
    if isinstance(posterior, Particles):
        return particle_score.unit_snr(posterior, groups)
    return (2 * unit_curvature(posterior, priors, groups)).sqrt()


def unit_curvature(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """½ μ_Sᵀ Σ_SS⁻¹ μ_S."""
    if isinstance(posterior, Particles):
        raise TypeError(
            f"{posterior.count} particles do not tell how all the weights of a unit vary together. "
            'Use criterion="snr", "density", "mass", "sign_stability" or "magnitude".'
        )
    return group_saliency(*reduced(posterior, groups))


def unit_density(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """−log q_S(0)."""
    if isinstance(posterior, Particles):
        return particle_score.unit_density(posterior, groups)
    if isinstance(posterior, Mixture):
        return _mixed(posterior, [unit_density(component, priors, groups) for component in posterior.components])
    posterior, groups = reduced(posterior, groups)
    random = _random(posterior, groups)
    sizes = torch.tensor([sum(len(i) for i in group.values()) for group in random], dtype=torch.float64)
    cost = group_saliency(posterior, groups)
    return cost + 0.5 * group_log_det(posterior, random) + 0.5 * math.log(2 * math.pi) * sizes


def unit_savage_dickey(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """Log p_S(0) − log q_S(0): the evidence lost when the priors of all the unit's weights collapse to zero."""
    if isinstance(posterior, Particles):
        raise TypeError(
            f"{posterior.count} particles have no joint density of all the weights of a unit to compare with the "
            'prior\'s. Use criterion="density".'
        )
    at_zero = {name: log_prior_at_zero(priors, name, mean.double()) for name, mean in posterior.mean.items()}
    log_prior = [
        sum(float(at_zero[n].flatten()[i].sum()) for n, i in group.items()) for group in _random(posterior, groups)
    ]
    return unit_density(posterior, priors, groups) + torch.tensor(log_prior, dtype=torch.float64)


def unit_mass(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """−log P(all |w| < ε): a sum, where weights are independent."""
    if isinstance(posterior, Particles):
        return particle_score.unit_mass(posterior, groups)
    if isinstance(posterior, Mixture):
        return _mixed(posterior, [unit_mass(component, priors, groups) for component in posterior.components])
    posterior, groups = reduced(posterior, groups) if isinstance(posterior, Gated) else (posterior, groups)
    if not isinstance(posterior, Diagonal):
        raise TypeError(
            "The probability that all weights of a unit are near zero has a closed form only for independent weights. "
            f'Got a {type(posterior).__name__} posterior: use criterion="curvature" or "density".'
        )
    single = {name: value.flatten() for name, value in mass(posterior, priors).items()}
    return torch.tensor([sum(float(single[n][i].sum()) for n, i in group.items()) for group in groups])


def unit_sign_stability(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """‖E w_S / ‖w_S‖‖, across particles."""
    if not isinstance(posterior, Particles):
        raise TypeError(
            "How stable the direction of a unit's weights is has a closed form for none but particles. "
            f'Got a {type(posterior).__name__} posterior: use criterion="snr".'
        )
    return particle_score.unit_sign_stability(posterior, groups)


def _mixed(posterior: Mixture, costs: Sequence[Tensor]) -> Tensor:
    return minus_log_mean(posterior, torch.stack([cost.double() for cost in costs]))


@singledispatch
def group_log_det(posterior: Posterior, groups: Sequence[Group]) -> Tensor:
    """log|Σ_SS| of each group of random weights, float64; register new posteriors here."""
    raise TypeError(f"The joint density of a unit needs a Gaussian posterior. Got {type(posterior).__name__}.")


@group_log_det.register
def _(posterior: Diagonal, groups: Sequence[Group]) -> Tensor:
    logs = {name: 2 * std.double().log().flatten() for name, std in posterior.std.items()}
    return torch.tensor([sum(float(logs[n][i].sum()) for n, i in group.items()) for group in groups]).double()


@group_log_det.register
def _(posterior: Gaussian, groups: Sequence[Group]) -> Tensor:
    # |Σ_SS| = |P_RR| / |P|
    whole = float(posterior.log_det_precision())

    def log_det(group: Group) -> float:
        masks = {}
        for name, index in group.items():
            mask = torch.ones(posterior.mean[name].numel(), dtype=torch.bool)
            mask[index.cpu()] = False
            masks[name] = mask.reshape(posterior.mean[name].shape)
        return float(posterior.condition(masks).log_det_precision()) - whole

    return torch.tensor([log_det(group) if group else 0.0 for group in groups], dtype=torch.float64)


@group_log_det.register
def _(posterior: Dense, groups: Sequence[Group]) -> Tensor:
    where = posterior.scatter(torch.arange(len(posterior.places), device=posterior.places.device))
    covariance = posterior.covariance.double()

    def log_det(group: Group) -> float:
        chosen = torch.cat([where[name].flatten()[index] for name, index in group.items()])
        return float(torch.linalg.slogdet(covariance[chosen][:, chosen])[1])

    return torch.tensor([log_det(group) if group else 0.0 for group in groups], dtype=torch.float64)


@group_log_det.register
def _(posterior: Kronecker, groups: Sequence[Group]) -> Tensor:
    layers = [_KroneckerLogDet(UnitSaliency(block, posterior.mean)) for block in posterior.blocks]
    rest = {name: -precision.double().log().flatten() for name, precision in posterior.rest.items()}

    def log_det(group: Group) -> float:
        within = sum(layer.of(group) for layer in layers if any(name in group for name in layer.unit.starts))
        return within + sum(float(rest[n][i].sum()) for n, i in group.items() if n in rest)

    return torch.tensor([log_det(group) for group in groups], dtype=torch.float64)


class _KroneckerLogDet:
    """log|Σ_SS| in one Kronecker layer: Σ_l log Σ_k (Q_G)²_ok / (λ_k μ_l + δ) for a whole row o, likewise a column."""

    def __init__(self, unit: UnitSaliency):
        self.unit, self.block = unit, unit.block
        inverse = self.block.eigenvalues.reciprocal()
        scale = 1.0 if self.block.scale is None else self.block.scale.square()
        log_scale = (torch.ones_like(inverse) * scale).double().log()
        self.rows = self.block.outputs.spread(inverse).double().log().sum(2) - log_scale.sum(2)
        self.columns = self.block.inputs.spread(inverse.mT).mT.double().log().sum(1) - log_scale.sum(1)

    def of(self, group: Group) -> float:
        codes = [group[name].cpu() + start for name, start in self.unit.starts.items() if name in group]
        places = self.unit.place[torch.cat(codes)].unique()
        _, outputs, inputs = self.block.eigenvalues.shape
        rows, columns = (places // inputs).unique(), (places % inputs).unique()
        if len(rows) == 1 and len(places) == inputs:
            return float(self.rows.flatten()[rows])
        one_group = len((rows // outputs).unique()) == 1
        if len(columns) == 1 and len(places) == outputs and one_group:
            return float(self.columns[rows[0] // outputs, columns])
        kept = torch.ones_like(self.block.eigenvalues, dtype=torch.bool)
        kept.view(-1)[places.to(kept.device)] = False
        return float(KeptBlock(self.block, kept).log_det() - self.block.log_det())


def _random(posterior: Posterior, groups: Sequence[Group]) -> list[Group]:
    """The groups without point masses."""
    support = posterior.support if isinstance(posterior, Gaussian) else {n: s > 0 for n, s in posterior.std.items()}
    random = {name: inside.flatten().cpu() for name, inside in support.items()}
    found: list[Group] = []
    for group in groups:
        inside = {name: index[random[name][index]] for name, index in group.items()}
        found.append({name: index for name, index in inside.items() if len(index)})
    return found
