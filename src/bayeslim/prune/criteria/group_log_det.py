"""log|Σ_SS|, the log-determinant of the covariance of all weights that go with a unit.

Closed forms for whole rows and columns of Kronecker layers; |Σ_SS| = |P_RR| / |P| otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

import torch
from torch import Tensor

from bayeslim.posteriors import Dense, Diagonal, Gaussian, Kronecker, Posterior
from bayeslim.posteriors.kept import KeptBlock
from bayeslim.posteriors.saliency import Group, UnitSaliency, mask_without


@singledispatch
def group_log_det(posterior: Posterior, groups: Sequence[Group]) -> Tensor:
    """Compute log|Σ_SS| of groups of random weights; register new posteriors here."""
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
        masks = {name: mask_without(posterior.mean[name].shape, index) for name, index in group.items()}
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
    layer_of = {name: layer for layer in layers for name in layer.unit.starts}
    rest = {name: -precision.double().log().flatten() for name, precision in posterior.rest.items()}

    def log_det(group: Group) -> float:
        within = sum(layer.of(group) for layer in dict.fromkeys(layer_of[n] for n in group if n in layer_of))
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
        places = self.unit.places(group)
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


def random_groups(posterior: Posterior, groups: Sequence[Group]) -> list[Group]:
    """Leave the point masses out of groups."""
    support = posterior.support if isinstance(posterior, Gaussian) else {n: s > 0 for n, s in posterior.std.items()}
    random = {name: inside.flatten().cpu() for name, inside in support.items()}
    found: list[Group] = []
    for group in groups:
        inside = {name: index[random[name][index]] for name, index in group.items()}
        found.append({name: index for name, index in inside.items() if len(index)})
    return found
