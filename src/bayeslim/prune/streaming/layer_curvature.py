"""The curvature of one layer V = [W, b] (outputs × inputs), without an eigendecomposition.

    local       P = D ⊗ (A + δ I)     A = mean a aᵀ of the layer's inputs, δ a fraction of A's mean diagonal
    kronecker   P = G ⊗ A + δ I       G = Σ g gᵀ of the gradients at the layer's outputs, δ = 1 / std² of the prior

The local curvature is the error of the layer's own outputs, ½ mean ‖(V − W) a‖² with damping (with D = I the objective
of SparseGPT: Frantar & Alistarh 2023, arXiv:2301.00774). With D = diag G the errors of all outputs have one unit, the
loss. The Kronecker curvature is the Laplace posterior's.

Both cuts are conditional means: with the weights S at zero the others solve P_RR v_R = (P w)_R, where w are the weights
before the cut. Conjugate gradients solve it, preconditioned by the inverse of each row's precision without its mask,
which the scores need as well: a step is the product G V A and one with an inverse of A. They run in float32; the
residual is computed in float64, and where it is too large they go on in float64. Locally every row is a system of its
own, the least-squares fit of that row on its surviving inputs. For an error e of the solution, the objective is larger
than its minimum by ½ eᵀ P e: a relative tolerance t costs the fraction t² of what moving the survivors gained.

Scores are the saliencies w² / 2Σ_ii. Σ = P⁻¹ has a closed form by Cholesky for the local curvature. For the Kronecker
curvature it is that of (G + √δ/π I) ⊗ (A + π√δ I), π² the ratio of the mean eigenvalues of A and G (Martens & Grosse
2015, arXiv:1503.05671), which is `Laplace(damping="sqrt")`. The exact diagonal of (G ⊗ A + δ I)⁻¹ would take an
eigendecomposition of both factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bayeslim.errors import BayeslimError
from bayeslim.posteriors.cholesky import cholesky
from bayeslim.posteriors.conjugate import Solution, Solve, Solver, conjugate_gradients
from bayeslim.posteriors.layer_matrix import LayerMatrix

MIN_FLOAT32_TOLERANCE = 1e-4
"""Conjugate gradients in float32 are not asked for a smaller error."""


@dataclass(frozen=True, eq=False)
class LayerCurvature:
    """The precision of one layer's matrix V, (groups, outputs, inputs), in float64.

    Attributes:
        layer: how the layer's parameters make V.
        inputs: A, (groups, inputs, inputs), with the bias's 1 as the last input.
        outputs: G, (groups, outputs, outputs); None for the local curvature.
        prior: δ.
        weights: D of the local curvature, (groups, outputs); None for the identity. Survivors do not depend on it.
    """

    layer: LayerMatrix
    inputs: Tensor
    outputs: Tensor | None
    prior: float
    weights: Tensor | None = None

    @classmethod
    def local(cls, layer: LayerMatrix, inputs: Tensor, damping: float, weights: Tensor | None = None) -> LayerCurvature:
        """Make the local curvature, damped by a fraction of A's mean diagonal."""
        mean = float(inputs.diagonal(dim1=1, dim2=2).mean())
        return cls(layer, inputs, None, damping * mean if mean > 0 else 1.0, weights)

    def check(self) -> None:
        """Raise a `BayeslimError` if the factors are not finite."""
        for what, factor in (("inputs", self.inputs), ("output gradients", self.outputs)):
            if factor is not None and not bool(torch.isfinite(factor).all()):
                raise BayeslimError(
                    f'The second moment of the {what} of "{self.layer.weight}" holds NaN or infinite values. Check the '
                    "calibration data and the network's weights; a network in float16 may need bfloat16."
                )

    def product(self, v: Tensor) -> Tensor:
        """Compute P v."""
        image = v @ self.inputs
        if self.outputs is not None:
            image = self.outputs @ image
        return image + self.prior * v

    @cached_property
    def dampings(self) -> tuple[float, float]:
        """The amounts added to A and to G for the scores."""
        if self.outputs is None:
            return self.prior, 0.0
        means = [float(f.diagonal(dim1=1, dim2=2).mean()) for f in (self.inputs, self.outputs)]
        ratio = (means[0] / means[1]) ** 0.5 if min(means) > 0 else 1.0
        return self.prior**0.5 * ratio, self.prior**0.5 / ratio

    @cached_property
    def input_inverse(self) -> Tensor:
        """(A + a I)⁻¹, (groups, inputs, inputs)."""
        return _inverse(_shifted(self.inputs, self.dampings[0]))

    @cached_property
    def output_inverse(self) -> Tensor | None:
        """(G + g I)⁻¹, (groups, outputs, outputs); None for the identity."""
        return None if self.outputs is None else _inverse(_shifted(self.outputs, self.dampings[1]))

    def scores(self, mean: Tensor) -> Tensor:
        """Compute w² / 2Σ_ii of every entry of V."""
        variance = 2 * self.input_inverse.diagonal(dim1=1, dim2=2)[:, None, :]
        if self.output_inverse is not None:
            variance = variance * self.output_inverse.diagonal(dim1=1, dim2=2)[:, :, None]
        return self._weighted(mean.square() / variance)

    def row_costs(self, mean: Tensor, sets: Sequence[Sequence[int]]) -> Tensor:
        """Compute ½ μ_Sᵀ Σ_SS⁻¹ μ_S of sets of whole rows; of one group only."""
        image = self._weighted(mean @ _shifted(self.inputs, self.dampings[0]))[0]
        return _costs(mean[0], image, None if self.output_inverse is None else self.output_inverse[0], sets)

    def column_costs(self, mean: Tensor, sets: Sequence[Sequence[int]]) -> Tensor:
        """Compute ½ μ_Sᵀ Σ_SS⁻¹ μ_S of sets of whole columns; of one group only."""
        image = self._weighted(mean) if self.outputs is None else _shifted(self.outputs, self.dampings[1]) @ mean
        return _costs(mean[0].mT, image[0].mT, self.input_inverse[0], sets)

    def _weighted(self, rows: Tensor) -> Tensor:
        return rows if self.weights is None else rows * self.weights[:, :, None]

    def survivors(self, mean: Tensor, kept: Tensor, solver: Solver) -> tuple[Tensor, Solve]:
        """Compute the conditional mean given zeros where `kept` is False.

        Args:
            mean: the weights before the cut, (groups, outputs, inputs), float64.
            kept: True = kept, of the same shape.
            solver: when conjugate gradients stop.
        """
        rhs = self.product(mean * ~kept) * kept
        exact, rough = (_Restricted(self, kept, dtype) for dtype in (torch.float64, torch.float32))
        found = rough.solve(rhs, replace(solver, tolerance=max(solver.tolerance, MIN_FLOAT32_TOLERANCE)))
        moved, used = found.value.double(), found.iterations
        relative = exact.error(moved, rhs)
        if not relative < 1:  # float32 got nowhere
            moved, relative = torch.zeros_like(moved), 1.0
        while relative > solver.tolerance and used < solver.max_iterations:
            left = Solver(min(0.1, solver.tolerance / min(relative, 1.0)), solver.max_iterations - used)
            found = exact.solve(rhs - exact.product(moved), left)
            used += found.iterations
            error = exact.error(moved + found.value, rhs)
            if not error < relative:  # rounding is reached
                break
            moved, relative = moved + found.value, error
        off = rhs - exact.product(moved)
        size = float(rhs.square().sum())
        residual = (float(off.square().sum()) / size) ** 0.5 if size > 0 else 0.0
        solve = Solve("row" if self.outputs is None else "joint", used, residual, relative <= solver.tolerance)
        return (mean + moved).masked_fill(~kept, 0), solve


class _Restricted:
    """P_RR of one layer in one dtype; without G, every row is a system of its own.

    Args:
        curvature: P.
        kept: R, (groups, outputs, inputs).
        dtype: of the products.
    """

    def __init__(self, curvature: LayerCurvature, kept: Tensor, dtype: torch.dtype):
        self.prior, self.kept, self.dtype = curvature.prior, kept.to(dtype), dtype
        self.inputs = curvature.inputs.to(dtype)
        self.outputs = None if curvature.outputs is None else curvature.outputs.to(dtype)
        self.inverse = curvature.input_inverse.to(dtype)
        self.rows = self.kept
        if curvature.outputs is not None:
            rows = curvature.outputs.diagonal(dim1=1, dim2=2)[:, :, None] + curvature.dampings[1]
            self.rows = (kept / rows).to(dtype)

    def product(self, v: Tensor) -> Tensor:
        """Compute P_RR v_R, for v_R that is zero elsewhere."""
        image = v @ self.inputs
        if self.outputs is not None:
            image = self.outputs @ image
        return image.add_(v, alpha=self.prior).mul_(self.kept)

    def precondition(self, r: Tensor) -> Tensor:
        """Compute K ∘ (D⁻¹ r (A + a I)⁻¹), D the diagonal of G + g I."""
        return (r @ self.inverse).mul_(self.rows)

    def solve(self, rhs: Tensor, solver: Solver) -> Solution:
        """Solve P_RR x = b by conjugate gradients."""
        rhs = rhs.to(self.dtype)
        if self.outputs is not None:
            return conjugate_gradients(self.product, rhs, self.precondition, solver)
        found = conjugate_gradients(
            lambda v: self.product(v[:, :, 0])[:, :, None],
            rhs[:, :, None],
            lambda r: self.precondition(r[:, :, 0])[:, :, None],
            solver,
        )
        return replace(found, value=found.value[:, :, 0])

    def error(self, x: Tensor, rhs: Tensor) -> float:
        """Compute the largest √(rᵀ M r / xᵀ P x) of a system, M the preconditioner."""
        image = self.product(x)
        off, dims = rhs - image, (1, 2) if self.outputs is not None else (2,)
        energy, size = (off * self.precondition(off)).sum(dims), (x * image).sum(dims)
        ratio = torch.where(energy > 0, energy / size, 0.0).nan_to_num(
            nan=torch.inf, posinf=torch.inf, neginf=torch.inf
        )
        return float(ratio.max().sqrt()) if ratio.numel() else 0.0


def _shifted(matrix: Tensor, shift: float) -> Tensor:
    shifted = matrix.clone()
    shifted.diagonal(dim1=1, dim2=2).add_(shift)
    return shifted


def _inverse(matrix: Tensor) -> Tensor:
    return torch.cholesky_inverse(cholesky(matrix)[0])


def _costs(mean: Tensor, image: Tensor, inverse: Tensor | None, sets: Sequence[Sequence[int]]) -> Tensor:
    """Compute ½ tr([Σ₁]_SS⁻¹ M_S B M_Sᵀ) of sets of rows of M, with `image` = M B."""
    alone = (mean * image).sum(1)
    if inverse is None:
        return torch.stack([alone[list(rows)].sum() for rows in sets]).cpu() / 2 if sets else alone[:0].cpu()
    single = (alone / inverse.diagonal()).cpu()
    costs = torch.empty(len(sets), dtype=torch.float64)
    for place, rows in enumerate(sets):
        if len(rows) == 1:
            costs[place] = single[rows[0]]
        else:
            index = torch.as_tensor(rows, device=mean.device)
            factor, _ = cholesky(inverse[index][:, index])
            costs[place] = float(torch.cholesky_solve(mean[index] @ image[index].mT, factor).trace())
    return costs / 2
