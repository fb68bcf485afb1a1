"""P_RR of one Kronecker layer: solving for the weights that are kept, in float64.

The joint solve is conjugate gradients on the masked product V ↦ K ∘ (G (K ∘ V) A + δ V), preconditioned by the masked
inverse K ∘ P⁻¹(K ∘ V), which is free to set up. It starts where a rough solve in float32 ends. Alone, on LeNet-300-100,
it takes 20 to 220 products for an error of 1e-6, a third of what the diagonal takes; with a weak prior, some hundreds.
Where it does not converge, a layer with few kept weights is solved by Cholesky. The error of the iterates falls in the
norm of P, so that wherever they end the posterior prefers the last one to weights that did not move.

Row by row, the kept entries of G_oo A + δ I are gathered and factored in batches (as in SparseGPT: Frantar & Alistarh
2023, arXiv:2301.00774). Neither forms the layer's covariance.

Log-determinant and marginal variances are exact where a group keeps at most `MAX_EXACT_WEIGHTS` weights. Beyond that
the log-determinant is a stochastic Lanczos quadrature (within 3 % on LeNet-300-100), and a variance is its row's, times
the factor by which correlations between rows raised it before the cut: exact if nothing is cut or G is diagonal, and
always between the variance given all other rows and that before the cut (on LeNet-300-100 at 85 to 98 % cut, a median
error of 1 to 30 %).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayeslim.posteriors.cholesky import cholesky
from bayeslim.posteriors.conjugate import (
    DEFAULT_SOLVER,
    Solve,
    Solver,
    conjugate_gradients,
    dot,
    log_det_estimate,
)
from bayeslim.posteriors.kronecker_block import KroneckerBlock

MAX_NUMBERS_PER_CHUNK = 2**26
"""Rows are factored in batches of at most this many numbers, or one row."""

ROUGH_TOLERANCE = 1e-4
"""When conjugate gradients in float32 stop: beyond it, residuals of ill-conditioned layers are rounding errors."""

MAX_EXACT_WEIGHTS = 2048
"""The precision of up to this many kept weights of a group is formed and factored."""


@dataclass(frozen=True, eq=False)
class KeptBlock:
    """The kept weights of one layer.

    Attributes:
        block: the layer.
        kept: True = kept, (groups, outputs, inputs).
        solver: when conjugate gradients stop.
    """

    block: KroneckerBlock
    kept: Tensor
    solver: Solver = DEFAULT_SOLVER

    def product(self, v: Tensor) -> Tensor:
        """Compute P_RR v_R."""
        return self.block.precision_product(v * self.kept) * self.kept

    def solve(self, v: Tensor) -> Tensor:
        """Compute P_RR⁻¹ v_R; leading dimensions are separate right-hand sides."""
        return self.solution(v)[0]

    def solution(self, v: Tensor) -> tuple[Tensor, Solve]:
        """Compute P_RR⁻¹ v_R, and tell how it was solved for."""
        rhs = v.double() * self.kept

        def precondition(r: Tensor) -> Tensor:
            return self.block.covariance_product(r) * self.kept

        start, used = self._start(rhs)
        rest = replace(self.solver, max_iterations=self.solver.max_iterations - used)
        found = conjugate_gradients(self.product, rhs, precondition, rest, start)
        found = replace(found, iterations=used + found.iterations)
        if found.converged:
            return found.value, Solve("joint", found.iterations, self._residual(found.value, rhs))
        if not self._small():
            return found.value, Solve("joint", found.iterations, self._residual(found.value, rhs), converged=False)
        direct = self._directly(rhs)
        value = torch.where(self._loss(direct, rhs) < self._loss(found.value, rhs), direct, found.value)
        return value, Solve("joint", found.iterations, self._residual(value, rhs))

    def _start(self, rhs: Tensor) -> tuple[Tensor, int]:
        """Solve roughly in float32, with the diagonal of P as preconditioner.

        A step costs two products of matrices in float32, where one of the exact solve costs six in float64. Systems
        that float32 does not bring forward start at zero.

        Returns:
            the solution in float64, and the number of iterations.
        """
        block = self.block
        if block.corrected is not None or self.solver.max_iterations < 2:  # the former has no product of its factors
            return torch.zeros_like(rhs), 0
        inverse = (self.kept / block.precision_diagonal).float()
        scale = None if block.scale is None else block.scale.float()
        kept = self.kept.float() if scale is None else self.kept * scale
        outputs, inputs = ((f.values if f.vectors is None else f.matrix).float() for f in (block.outputs, block.inputs))
        prior = float(block.prior)

        def product(v: Tensor) -> Tensor:
            v = v if scale is None else v * scale
            image = v * inputs[:, None, :] if inputs.ndim == 2 else v @ inputs
            image = outputs[..., None] * image if outputs.ndim == 2 else outputs @ image
            return (image + prior * v) * kept

        rough = Solver(ROUGH_TOLERANCE, self.solver.max_iterations // 2)
        largest = dot(rhs, rhs).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        found = conjugate_gradients(product, (rhs / largest).float(), lambda r: r * inverse, rough)
        value = found.value.double() * largest
        return torch.where(self._loss(value, rhs) < 0, value, 0.0), found.iterations

    def _loss(self, x: Tensor, rhs: Tensor) -> Tensor:
        """Compute ½ xᵀ P_RR x − xᵀ b of every system; infinite where x is not finite."""
        loss = dot(x, 0.5 * self.product(x) - rhs)
        return loss.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def _residual(self, x: Tensor, rhs: Tensor) -> float:
        """Compute the largest ‖b − P_RR x‖ / ‖b‖ of a system."""
        off, size = rhs - self.product(x), dot(rhs, rhs)
        ratio = torch.where(size > 0, dot(off, off) / size, 0.0)
        return float(ratio.max().sqrt()) if ratio.numel() else 0.0

    def _directly(self, rhs: Tensor) -> Tensor:
        """Solve by the Cholesky factor of every group."""
        value = torch.zeros_like(rhs)
        for group, (places, factor) in enumerate(self._exact()):
            target = rhs[..., group, :, :].flatten(-2)[..., places]
            solved = torch.cholesky_solve(target[..., None], factor)[..., 0]
            flat = value.new_zeros(*rhs.shape[:-3], rhs.shape[-2] * rhs.shape[-1])
            value[..., group, :, :] = flat.index_copy(-1, places, solved).unflatten(-1, rhs.shape[-2:])
        return value

    def log_det(self) -> Tensor:
        """Compute log|P_RR|, float64."""
        if self._small():
            logs = [factor.diagonal().double().log().sum() for _, factor in self._exact()]
            return 2 * torch.stack(logs).sum()
        root = self.block.precision_diagonal.sqrt()

        def scaled(v: Tensor) -> Tensor:
            return self.product(v / root) / root

        estimate = log_det_estimate(scaled, self.kept, root.dtype).sum()
        return estimate + 2 * (root.double().log() * self.kept).sum()

    def variance(self) -> Tensor:
        """Compute the diagonal of P_RR⁻¹, zero where cut."""
        if self._small():
            variance = torch.zeros_like(self.block.eigenvalues)
            for group, (places, factor) in enumerate(self._exact()):
                inverse = torch.cholesky_inverse(factor).diagonal().to(variance)
                variance[group].view(-1)[places] = inverse
            return variance
        inflation = self.block.variance / self.block.rowwise.variance
        return _rowwise_variance(self.block, self.kept) * inflation

    def _small(self) -> bool:
        return int(self.kept.flatten(1).sum(1).max()) <= MAX_EXACT_WEIGHTS

    def _exact(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each group the flat places of its kept weights, and their factor."""
        for group, kept in enumerate(self.kept):
            places = kept.flatten().nonzero()[:, 0]
            yield places, cholesky(self.entries(group, places))[0]

    def entries(self, group: int, places: Tensor) -> Tensor:
        """Form P of one group at flat places, (n, n)."""
        block = self.block
        inputs = block.inputs.size
        o, i = places // inputs, places % inputs
        if block.corrected is None:
            entries = block.outputs.entries(group, o[:, None], o) * block.inputs.entries(group, i[:, None], i)
            entries = entries + torch.diag_embed(block.prior.expand(len(places)))
            if block.scale is not None:
                scale = block.scale[group].flatten()[places]
                entries = entries * scale[:, None] * scale
            return entries
        columns = []
        for part in places.split(max(1, MAX_NUMBERS_PER_CHUNK // block.eigenvalues.numel())):
            unit = block.eigenvalues.new_zeros(len(part), *block.eigenvalues.shape)
            unit[:, group].view(len(part), -1).scatter_(1, part[:, None], 1.0)
            columns.append(block.precision_product(unit)[:, group].reshape(len(part), -1)[:, places])
        return torch.cat(columns) if columns else block.eigenvalues.new_zeros(0, 0)


def rowwise_survivors(block: KroneckerBlock, kept: Tensor, mean: Tensor) -> Tensor:
    """Move kept weights as if rows were independent, each with G_oo A + δ I."""
    rows = block.rowwise
    pull = rows.precision_product(mean * ~kept) * kept
    moved = torch.zeros_like(mean)
    for row, places, valid, factor in kept_rows(rows, kept, kept.any(-1) & ~kept.all(-1)):
        target = pull[row[:, 0], row[:, 1]].gather(1, places)[..., None]
        solved = torch.cholesky_solve(target, factor)[..., 0] * valid
        moved[row[:, 0], row[:, 1]] = torch.zeros_like(mean[0, 0]).expand(len(row), -1).scatter_add(1, places, solved)
    return (mean + moved) * kept


def _rowwise_variance(block: KroneckerBlock, kept: Tensor) -> Tensor:
    variance = torch.zeros_like(block.eigenvalues)
    for row, places, valid, factor in kept_rows(block.rowwise, kept, kept.any(-1)):
        identity = torch.eye(places.shape[1], dtype=factor.dtype, device=factor.device)
        # (L Lᵀ)⁻¹ has the diagonal of L⁻ᵀ L⁻¹; GPUs solve a batch with L at once, and invert from it one by one
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False).square().sum(-2) * valid
        variance[row[:, 0], row[:, 1]] = inverse.new_zeros(len(row), kept.shape[-1]).scatter_add(1, places, inverse)
    return variance


def kept_rows(rows: KroneckerBlock, kept: Tensor, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield chunks of rows with the Cholesky factors of their kept precision.

    Rows of like counts go together; shorter ones are padded with places whose precision is the identity.

    Yields:
        (group, output) of the rows (n, 2), the kept places (n, m), the mask of those that are no padding (n, m), and
        the factors (n, m, m), float64.
    """
    found = wanted.nonzero()
    counts = kept[found[:, 0], found[:, 1]].sum(-1)
    order = counts.argsort(descending=True)
    found, counts = found[order], counts[order]
    start = 0
    while start < len(found):
        width = int(counts[start])
        row = found[start : start + max(1, MAX_NUMBERS_PER_CHUNK // width**2)]
        start += len(row)
        mask = kept[row[:, 0], row[:, 1]]
        places = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :width]
        valid = mask.gather(1, places)
        yield row, places, valid, cholesky(_row_precision(rows, row, places, valid))[0]


def _row_precision(rows: KroneckerBlock, row: Tensor, places: Tensor, valid: Tensor) -> Tensor:
    """Form each row's precision at its places, the identity at padding, (n, m, m)."""
    group, output = row[:, 0], row[:, 1]
    left, right = places[:, :, None], places[:, None, :]
    if rows.corrected is None:
        entries = rows.inputs.entries(group[:, None, None], left, right)
        entries = entries * rows.outputs.values[group, output, None, None]
        entries = entries + torch.diag_embed(rows.prior.expand(places.shape))
    else:
        values = rows.eigenvalues[group, output]
        if rows.inputs.vectors is None:
            entries = torch.diag_embed(values.gather(1, places))
        else:
            vectors = rows.inputs.vectors[group[:, None], places]
            entries = (vectors * values[:, None, :]) @ vectors.mT
    if rows.scale is not None:
        scale = rows.scale[group, output].gather(1, places)
        entries = entries * scale[:, :, None] * scale[:, None, :]
    identity = torch.eye(places.shape[1], dtype=entries.dtype, device=entries.device)
    return torch.where(valid[:, :, None] & valid[:, None, :], entries, identity)
