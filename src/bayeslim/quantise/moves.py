"""Weights that are not rounded yet move to their conditional mean given the rounded ones.

Given w_S = q_S, the conditional mean of the other weights R of a Gaussian with precision P is

    μ_R − Σ_RS Σ_SS⁻¹ (μ_S − q_S) = μ_R + P_RR⁻¹ P_RS (μ_S − q_S),

as in pruning, which is rounding to zero. Where the covariance fits in memory, weights are rounded one by one: with
Σ = UᵀU (U upper triangular), U_ii² is the variance of weight i given those before it, the others move by
(w_i − q_i) / U_ii times the rest of row i, and ½ Σ ((w_i − q_i) / U_ii)² is the total loss (Hassibi & Stork 1993;
Frantar et al. 2022, arXiv:2210.17323). Larger layers are rounded in parts, and the remaining weights compensate for
each part. Weights with a large precision are rounded first, since the others have more room to compensate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import Tensor

from bayeslim.posteriors import Conditioned, Dense, Gaussian, Kronecker, Posterior
from bayeslim.posteriors.cholesky import cholesky
from bayeslim.posteriors.conjugate import DEFAULT_SOLVER
from bayeslim.posteriors.kept import KeptBlock, kept_rows
from bayeslim.posteriors.kronecker_block import KroneckerBlock
from bayeslim.quantise.rounding import Rounder
from bayeslim.types import Params

MAX_DENSE_WEIGHTS = 4096
"""The most kept weights in a group of a Kronecker layer whose precision is formed as a dense matrix."""


@dataclass(frozen=True, eq=False)
class Rounding:
    """The weights to round and their rounders; all by name, flattened.

    Attributes:
        mean: the weights, float64.
        kept: the mask of the weights to round.
        precision: the diagonal of the posterior precision.
        rounders: of every parameter with kept weights.
        shapes: of the parameters.
    """

    mean: Params
    kept: Params
    precision: Params
    rounders: Mapping[str, Rounder]
    shapes: Mapping[str, torch.Size]

    def only(self, kept: Mapping[str, Tensor]) -> Rounding:
        """Restrict the task to fewer weights."""
        return replace(self, kept={name: mask & kept[name] for name, mask in self.kept.items()})

    def shaped(self, params: Params) -> Params:
        """Reshape flat parameters to their own shapes."""
        return {name: value.reshape(*value.shape[:-1], *self.shapes[name]) for name, value in params.items()}

    def codes(self, name: str, places: Tensor, values: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        """Round some weights of a parameter, by their flat indices, to codes and levels."""
        rounder = self.rounders[name].at(places)
        found = rounder(values, precision)
        return found, rounder.levels(found)


@singledispatch
def round_jointly(posterior: Posterior, task: Rounding, parts: int) -> Params:
    """Round all kept weights to codes by name, flat; the others get code zero."""
    return _in_parts(None, task, 1)


@round_jointly.register
def _(posterior: Gaussian, task: Rounding, parts: int) -> Params:
    return _in_parts(posterior, task, parts)


@round_jointly.register
def _(posterior: Conditioned, task: Rounding, parts: int) -> Params:
    return round_jointly(posterior.base, task, parts)


@round_jointly.register
def _(posterior: Dense, task: Rounding, parts: int) -> Params:
    support = {name: random.flatten() for name, random in posterior.support.items()}
    moving = task.only(support)
    codes = _in_parts(None, task.only({name: ~random for name, random in support.items()}), 1)
    kept = torch.cat([moving.kept[name] for name in task.mean])[posterior.places].nonzero()[:, 0]
    _one_by_one(posterior.precision[kept][:, kept], posterior.places[kept], tuple(task.mean), task, codes)
    return codes


@round_jointly.register
def _(posterior: Kronecker, task: Rounding, parts: int) -> Params:
    """Round layers with few kept weights one by one, the others in parts."""
    kept_in = {block: _matrix(block, task.shaped(task.kept)) for block in posterior.blocks}
    small = [block for block, kept in kept_in.items() if int(kept.flatten(1).sum(1).max()) <= MAX_DENSE_WEIGHTS]
    exact = {name for block in small for name in block.layer.names}
    others = {name: torch.full_like(mask, name not in exact) for name, mask in task.kept.items()}
    codes = _in_parts(posterior, task.only(others), parts)
    for block in small:
        layer = KeptBlock(block, kept_in[block])
        where = _matrix(block, task.shaped(_places(block.layer.names, task)))
        for group, mask in enumerate(layer.kept):
            places = mask.flatten().nonzero()[:, 0]
            precision = layer.entries(group, places)
            _one_by_one(precision, where[group].flatten()[places], block.layer.names, task, codes)
    return codes


def round_rows(posterior: Posterior, task: Rounding) -> Params:
    """Round each output's row of a Kronecker posterior on its own.

    Row o has precision G_oo A + δ I.

    All rows are rounded side by side, weight by weight. Exact only if outputs are uncorrelated.
    """
    base = posterior.base if isinstance(posterior, Conditioned) else posterior
    if not isinstance(base, Kronecker):
        raise ValueError(f'move="row" needs a Kronecker posterior. Got {type(base).__name__}. Use move="joint".')
    inside = {name for block in base.blocks for name in block.layer.names}
    codes = _in_parts(None, task.only({n: torch.full_like(k, n not in inside) for n, k in task.kept.items()}), 1)
    for block in base.blocks:
        kept = _matrix(block, task.shaped(task.kept))
        where = _matrix(block, task.shaped(_places(block.layer.names, task)))
        matrix = _matrix(block, task.shaped(task.mean))
        for row, places, valid, factor in kept_rows(block.rowwise, kept, kept.any(-1)):
            group, output = row.unbind(1)
            targets = where[group, output].gather(1, places).masked_fill(~valid, -1)
            values = matrix[group, output].gather(1, places)
            _last_to_first(values, targets, factor.double(), block.layer.names, task, codes)
    return codes


def _one_by_one(precision: Tensor, targets: Tensor, names: Sequence[str], task: Rounding, codes: Params) -> None:
    """Round weights with precision (n, n) at concatenated indices, into `codes`."""
    order = precision.diagonal().argsort()
    targets = targets[order]
    factor = cholesky(precision[order][:, order].double())[0]
    values = torch.cat([task.mean[name] for name in names])[targets]
    _last_to_first(values[None], targets[None], factor[None], names, task, codes)


def _last_to_first(
    values: Tensor, targets: Tensor, factor: Tensor, names: Sequence[str], task: Rounding, codes: Params
) -> None:
    """Round rows of weights from the last weight to the first, into `codes`.

    All rows are rounded side by side.

    Args:
        values: (rows, n).
        targets: their indices in the concatenated parameters, −1 for padding, (rows, n).
        factor: L of each row's precision L Lᵀ, (rows, n, n); its flipped inverse is U of the covariance.
        names: of the parameters.
        task: the rounders.
        codes: the output.
    """
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    upper = torch.linalg.solve_triangular(factor, identity, upper=False).flip(-1, -2)
    targets, values = targets.flip(-1), values.flip(-1)
    ends = torch.tensor([task.mean[name].numel() for name in names]).cumsum(0).tolist()
    bounds = list(zip(names, [0, *ends[:-1]], ends, strict=True))
    for step in range(values.shape[1]):
        spread = upper[:, step, step]
        error = torch.zeros_like(spread)
        for name, start, end in bounds:
            mine = ((targets[:, step] >= start) & (targets[:, step] < end)).nonzero()[:, 0]
            if not len(mine):
                continue
            at = targets[mine, step] - start
            found, levels = task.codes(name, at, values[mine, step], spread[mine].square().reciprocal())
            error[mine] = (values[mine, step] - levels) / spread[mine]
            codes[name][at] = found
        values[:, step + 1 :] -= error[:, None] * upper[:, step, step + 1 :]


def _in_parts(posterior: Gaussian | None, task: Rounding, parts: int) -> Params:
    """Round in parts, the largest precisions first; the rest moves after each."""
    current = dict(task.mean)
    codes = {name: torch.zeros_like(value, dtype=torch.int64) for name, value in current.items()}
    free = {name: kept.clone() for name, kept in task.kept.items()}
    order = {}
    for name in task.rounders:
        places = task.kept[name].nonzero()[:, 0]
        order[name] = places[task.precision[name][places].argsort(descending=True)]
    for part in range(parts):
        errors = {name: torch.zeros_like(value) for name, value in current.items()}
        for name, places in order.items():
            chosen = places[len(places) * part // parts : len(places) * (part + 1) // parts]
            values = current[name][chosen]
            codes[name][chosen], levels = task.codes(name, chosen, values, task.precision[name][chosen])
            errors[name][chosen] = values - levels
            free[name][chosen] = False
        if posterior is not None and any(bool(left.any()) for left in free.values()):
            pull = posterior.precision_product(task.shaped(errors))
            shift = posterior.restrict(task.shaped(free), DEFAULT_SOLVER).solve(pull)
            current = {name: value + shift[name].flatten().double() * free[name] for name, value in current.items()}
    return codes


def _matrix(block: KroneckerBlock, params: Params) -> Tensor:
    return block.layer.matrix({name: params[name] for name in block.layer.names})


def _places(names: Sequence[str], task: Rounding) -> Params:
    """Return the indices of all weights in the concatenated parameters."""
    found, start = {}, 0
    for name in names:
        size = task.mean[name].numel()
        found[name] = torch.arange(start, start + size, device=task.mean[name].device)
        start += size
    return found
