"""The cost of a cut: the loss in log-density at the best point with the cut weights at zero.

    one weight:  μ_i² / 2Σ_ii        a set S together:  ½ μ_Sᵀ Σ_SS⁻¹ μ_S

(optimal brain surgeon: Hassibi & Stork 1993). Sets are units: a neuron's incoming row and bias with its outgoing
columns. For a Kronecker layer whole rows and columns have a closed form with the prior exact, since Σ of row o is
Q_A diag(Σ_k (Q_G)²_ok / (λ_k μ_l + δ)) Q_Aᵀ, and several rows or columns together need only a small solve for each
eigenvalue. Rows and columns that cross, as those of a recurrent unit, need the eigenvectors of A without the columns.
Any other set is conditioned on: the cost is ½ (m − μ)ᵀ P (m − μ) at the conditional mean m.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, singledispatch

import torch
from torch import Tensor

from bayeslim.errors import ShapeMismatch, closest
from bayeslim.posteriors.base import Posterior
from bayeslim.posteriors.cholesky import cholesky
from bayeslim.posteriors.dense import Dense
from bayeslim.posteriors.diagonal import Diagonal
from bayeslim.posteriors.gaussian import Gaussian
from bayeslim.posteriors.kept import KeptBlock
from bayeslim.posteriors.kronecker import Kronecker
from bayeslim.posteriors.kronecker_block import KroneckerBlock
from bayeslim.types import Params

Group = Mapping[str, Tensor]
"""Flat indices of the weights that go together, by parameter name."""


def slice_indices(shape: Sequence[int], dim: int, index: int | Sequence[int] | Tensor) -> Tensor:
    """Find the flat indices of slices, such as a unit's rows (0) or columns (1).

    >>> slice_indices((2, 3), 1, 2).tolist()
    [2, 5]
    """
    count = torch.Size(shape).numel()
    wanted = torch.as_tensor(index).reshape(-1)
    return torch.arange(count).reshape(tuple(shape)).index_select(dim, wanted).flatten()


def saliency(posterior: Posterior) -> Params:
    """Compute μ² / 2Σ_ii of each weight alone; zero for a point mass at zero."""
    variance = posterior.variance
    return {
        name: (value.to(variance[name]).square() / (2 * variance[name])).nan_to_num(0.0, posinf=torch.inf)
        for name, value in posterior.mean.items()
    }


@singledispatch
def group_saliency(posterior: Posterior, groups: Sequence[Group]) -> Tensor:
    """Compute ½ μ_Sᵀ Σ_SS⁻¹ μ_S for each group of weights S, in float64.

    It is infinite if S holds a point mass away from zero.

    Args:
        posterior: a Gaussian: diagonal, Kronecker, dense, low-rank or conditioned (for the last two, a solve a group).
        groups: each the flat indices of its weights by parameter name; they may span layers, and overlap.

    Raises:
        TypeError: for a posterior that is no Gaussian.
    """
    raise TypeError(f"group_saliency needs a Gaussian posterior. Got {type(posterior).__name__}.")


@group_saliency.register
def _(posterior: Diagonal, groups: Sequence[Group]) -> Tensor:
    single = saliency(posterior)
    costs = [sum(single[n].flatten()[i].double().sum() for n, i in _checked(g, posterior).items()) for g in groups]
    return torch.tensor([float(cost) for cost in costs], dtype=torch.float64)


@group_saliency.register
def _(posterior: Gaussian, groups: Sequence[Group]) -> Tensor:
    support = posterior.support

    def cost(group: Group) -> float:
        masks = {}
        for name, index in group.items():
            fixed = ~support[name].flatten()[index]
            if bool((fixed & (posterior.mean[name].flatten()[index] != 0)).any()):
                return torch.inf
            masks[name] = mask_without(posterior.mean[name].shape, index).to(posterior.mean[name].device)
        return 0.5 * float(posterior.quadratic(posterior.condition(masks).mean))

    return torch.tensor([cost(_checked(group, posterior)) for group in groups], dtype=torch.float64)


@group_saliency.register
def _(posterior: Dense, groups: Sequence[Group]) -> Tensor:
    size = posterior.layout.size
    where = torch.full((size,), -1, dtype=torch.int64, device=posterior.places.device)
    where[posterior.places] = torch.arange(len(posterior.places), device=where.device)
    where_by_name = posterior.layout.params(where)
    mean, covariance = posterior.gather(posterior.mean), posterior.covariance

    def cost(group: Group) -> float:
        places = []
        for name, index in group.items():
            place = where_by_name[name].flatten()[index]
            if bool((posterior.mean[name].flatten()[index][place < 0] != 0).any()):
                return torch.inf
            places.append(place[place >= 0])
        chosen = torch.cat(places) if places else where[:0]
        return _half_quadratic(covariance[chosen][:, chosen], mean[chosen])

    return torch.tensor([cost(_checked(group, posterior)) for group in groups], dtype=torch.float64)


@group_saliency.register
def _(posterior: Kronecker, groups: Sequence[Group]) -> Tensor:
    layers = [UnitSaliency(block, posterior.mean) for block in posterior.blocks]
    layer_of = {name: layer for layer in layers for name in layer.block.layer.names}
    single = {
        name: precision * posterior.mean[name].to(precision).square() / 2 for name, precision in posterior.rest.items()
    }

    def cost(group: Group) -> float:
        total = sum(layer.cost(group) for layer in dict.fromkeys(layer_of[n] for n in group if n in layer_of))
        return total + sum(float(single[n].flatten()[i].double().sum()) for n, i in group.items() if n in single)

    return torch.tensor([cost(_checked(group, posterior)) for group in groups], dtype=torch.float64)


class UnitSaliency:
    """The costs of sets of weights in one Kronecker layer."""

    def __init__(self, block: KroneckerBlock, mean: Mapping[str, Tensor]):
        self.block = block
        layer = block.layer
        matrix = layer.matrix({name: mean[name].to(block.eigenvalues) for name in layer.names})
        self.mean = matrix if block.scale is None else matrix * block.scale
        self.unscaled = matrix
        sizes = {name: mean[name].numel() for name in layer.names}
        starts = {layer.weight: 0} | ({} if layer.bias is None else {layer.bias: sizes[layer.weight]})
        self.starts = starts
        flat = {name: torch.arange(sizes[name]).reshape(mean[name].shape) + starts[name] for name in layer.names}
        codes = layer.matrix(flat).flatten()
        self.place = torch.empty_like(codes).scatter_(0, codes, torch.arange(len(codes)))

    @cached_property
    def rows(self) -> Tensor:
        """The cost of each whole row, (groups, outputs)."""
        inverse = self.block.outputs.spread(self.block.eigenvalues.reciprocal())
        return (self.block.inputs.rotate(self.mean.mT).mT.square() / inverse).double().sum(2).cpu() / 2

    @cached_property
    def columns(self) -> Tensor:
        """The cost of each whole column, (groups, inputs)."""
        inverse = self.block.inputs.spread(self.block.eigenvalues.reciprocal().mT).mT
        return (self.block.outputs.rotate(self.mean).square() / inverse).double().sum(1).cpu() / 2

    def places(self, group: Group) -> Tensor:
        """Find the places of a group's weights in the layer's matrix, flat."""
        codes = [group[name].cpu() + start for name, start in self.starts.items() if name in group]
        return self.place[torch.cat(codes)]

    def cost(self, group: Group) -> float:
        """Compute ½ μ_Sᵀ Σ_SS⁻¹ μ_S of the group's weights in this layer."""
        places = self.places(group)
        matrices, outputs, inputs = self.mean.shape
        matrix_of = places // (outputs * inputs)
        total = 0.0
        for index in _distinct(matrix_of, matrices).tolist():
            inside = places[matrix_of == index] - index * outputs * inputs
            rows, columns = _distinct(inside // inputs, outputs), _distinct(inside % inputs, inputs)
            if len(inside) == len(rows) * inputs:
                total += self._several(index, rows) if len(rows) > 1 else float(self.rows[index, rows])
            elif len(inside) == len(columns) * outputs:
                several = len(columns) > 1
                total += self._several(index, columns, True) if several else float(self.columns[index, columns])
            else:
                crossed = self._whole_lines(inside)
                total += self._any(index, inside) if crossed is None else self._crossed(index, *crossed)
        return total

    def _several(self, index: int, chosen: Tensor, by_column: bool = False) -> float:
        """Solve for several whole rows (columns), once per eigenvalue of the other side."""
        mine, other = self.block.outputs, self.block.inputs
        variance, mean = self.block.eigenvalues.reciprocal()[index], self.mean[index]
        if by_column:
            mine, other, variance, mean = other, mine, variance.mT, mean.mT
        rotated = mean[chosen] if other.vectors is None else mean[chosen] @ other.vectors[index]
        vectors = torch.eye(mine.size).to(variance) if mine.vectors is None else mine.vectors[index]
        covariance = torch.einsum("rk,kl,sk->lrs", vectors[chosen], variance, vectors[chosen])
        return _half_quadratic(covariance, rotated.mT)

    def _whole_lines(self, inside: Tensor) -> tuple[Tensor, Tensor] | None:
        """Find the rows and columns that places are made of.

        None for other sets, and for corrected eigenvalues.
        """
        _, outputs, inputs = self.mean.shape
        rows = (torch.bincount(inside // inputs, minlength=outputs) == inputs).nonzero()[:, 0]
        columns = (torch.bincount(inside % inputs, minlength=inputs) == outputs).nonzero()[:, 0]
        size = len(rows) * inputs + len(columns) * outputs - len(rows) * len(columns)
        return None if len(inside) != size or self.block.corrected is not None else (rows, columns)

    def _crossed(self, index: int, rows: Tensor, columns: Tensor) -> float:
        """Solve for whole columns, then for whole rows of what is left.

        A recurrent unit is both in its own layer. Without the columns C, P is G ⊗ A_cc + δ over the other columns c,
        again of Kronecker form, and these move by its inverse times G W_C A_Cc.
        """
        left = torch.ones(self.block.inputs.size, dtype=torch.bool)
        left[columns] = False
        inputs, mean = self.block.inputs.matrix[index], self.mean[index]
        values, vectors = torch.linalg.eigh(inputs[left][:, left])
        g, q = self.block.outputs.values[index], self.block.outputs.vectors
        basis = torch.eye(len(g)).to(g) if q is None else q[index]
        variance = (g[:, None] * values.clamp(min=0) + self.block.prior).reciprocal()
        pull = g[:, None] * (basis.mT @ mean[:, columns]) @ (inputs[columns][:, left] @ vectors)
        moved = mean[rows][:, left] @ vectors + basis[rows] @ (variance * pull)
        covariance = torch.einsum("rk,kl,sk->lrs", basis[rows], variance, basis[rows])
        alone = self._several(index, columns, True)
        return alone + _half_quadratic(covariance, moved.mT)

    def _any(self, index: int, inside: Tensor) -> float:
        kept = torch.ones_like(self.mean, dtype=torch.bool)
        kept[index].view(-1)[inside] = False
        moved = KeptBlock(self.block, kept).solve(self.block.precision_product(self.unscaled * ~kept))
        off = moved - self.unscaled * ~kept
        return float((off * self.block.precision_product(off)).double().sum()) / 2


def _distinct(values: Tensor, size: int) -> Tensor:
    """Find the distinct values of whole numbers below `size`."""
    # `unique` sorts, and starts all threads for it
    return torch.bincount(values, minlength=size).nonzero()[:, 0]


def _half_quadratic(covariance: Tensor, mean: Tensor) -> float:
    """Sum ½ μᵀ Σ⁻¹ μ over a batch."""
    factor, _ = cholesky(covariance.double())
    white = torch.linalg.solve_triangular(factor, mean.double()[..., None], upper=False)
    return float(white.square().sum()) / 2


def mask_without(shape: torch.Size, index: Tensor) -> Tensor:
    """Make a mask that is False at flat indices."""
    mask = torch.ones(shape.numel(), dtype=torch.bool)
    mask[index.cpu()] = False
    return mask.reshape(shape)


def _checked(group: Group, posterior: Posterior) -> Params:
    """Check that a group fits the posterior; return it on the CPU, distinct."""
    mean, found = posterior.mean, {}
    for name, given in group.items():
        if name not in mean:
            raise ShapeMismatch(
                f'"{name}" is no parameter of this posterior. '
                f"Closest names: {closest(name, mean) or ', '.join(list(mean)[:3])}."
            )
        size, index = mean[name].numel(), given.cpu()
        flat = index.ndim == 1 and index.dtype == torch.int64
        if flat and bool((index[1:] <= index[:-1]).any()):
            index = index.unique()
        if not flat or (len(index) and not 0 <= int(index[0]) <= int(index[-1]) < size):
            raise ShapeMismatch(
                f'A group needs flat indices (int64) of "{name}" from 0 to {size - 1}. '
                f"Got {given.dtype} of shape {tuple(given.shape)}."
            )
        found[name] = index
    return found
