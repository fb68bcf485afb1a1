"""The curvature of one layer V = [W, b] (outputs × inputs), without an eigendecomposition.

    local       P = I ⊗ (A + δ I)     A = mean a aᵀ of the layer's inputs, δ a fraction of A's mean diagonal
    kronecker   P = G ⊗ A + δ I       G = Σ g gᵀ of the gradients at the layer's outputs, δ = 1 / std² of the prior

The local curvature is the error of the layer's own outputs, ½ mean ‖(V − W) a‖² with damping (the objective of
SparseGPT: Frantar & Alistarh 2023, arXiv:2301.00774). The Kronecker curvature is the Laplace posterior's.

Both cuts are conditional means: with the weights S at zero the others solve P_RR v_R = (P w)_R, where w are the weights
before the cut. Conjugate gradients solve it in float64, with the diagonal of P as preconditioner: a step is one product
G V A, and no factor is inverted. Locally every row is a system of its own, the least-squares fit of that row on its
surviving inputs. For an error e of the solution, the objective is larger than its minimum by ½ eᵀ P e: a relative
tolerance t costs the fraction t² of what moving the survivors gained.

Scores are the saliencies w² / 2Σ_ii. Σ = P⁻¹ has a closed form by Cholesky for the local curvature. For the Kronecker
curvature it is that of (G + √δ/π I) ⊗ (A + π√δ I), π² the ratio of the mean eigenvalues of A and G (Martens & Grosse
2015, arXiv:1503.05671), which is `Laplace(damping="sqrt")`. The exact diagonal of (G ⊗ A + δ I)⁻¹ would take an
eigendecomposition of both factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bayeslim.errors import BayeslimError
from bayeslim.posteriors.cholesky import cholesky
from bayeslim.posteriors.conjugate import Solve, Solver, conjugate_gradients, dot
from bayeslim.posteriors.layer_matrix import LayerMatrix


@dataclass(frozen=True, eq=False)
class LayerCurvature:
    """The precision of one layer's matrix V, (groups, outputs, inputs), in float64.

    Attributes:
        layer: how the layer's parameters make V.
        inputs: A, (groups, inputs, inputs), with the bias's 1 as the last input.
        outputs: G, (groups, outputs, outputs); None for the local curvature.
        prior: δ.
    """

    layer: LayerMatrix
    inputs: Tensor
    outputs: Tensor | None
    prior: float

    @classmethod
    def local(cls, layer: LayerMatrix, inputs: Tensor, damping: float) -> LayerCurvature:
        """Make the local curvature, damped by a fraction of A's mean diagonal."""
        mean = float(inputs.diagonal(dim1=1, dim2=2).mean())
        return cls(layer, inputs, None, damping * mean if mean > 0 else 1.0)

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
    def diagonal(self) -> Tensor:
        """The diagonal of P, (groups, outputs or 1, inputs)."""
        inputs = self.inputs.diagonal(dim1=1, dim2=2)[:, None, :]
        if self.outputs is None:
            return inputs + self.prior
        return self.outputs.diagonal(dim1=1, dim2=2)[:, :, None] * inputs + self.prior

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
        return mean.square() / variance

    def row_costs(self, mean: Tensor, sets: Sequence[Sequence[int]]) -> Tensor:
        """Compute ½ μ_Sᵀ Σ_SS⁻¹ μ_S of sets of whole rows; of one group only."""
        image = (mean @ _shifted(self.inputs, self.dampings[0]))[0]
        return _costs(mean[0], image, None if self.output_inverse is None else self.output_inverse[0], sets)

    def column_costs(self, mean: Tensor, sets: Sequence[Sequence[int]]) -> Tensor:
        """Compute ½ μ_Sᵀ Σ_SS⁻¹ μ_S of sets of whole columns; of one group only."""
        image = mean if self.outputs is None else _shifted(self.outputs, self.dampings[1]) @ mean
        return _costs(mean[0].mT, image[0].mT, self.input_inverse[0], sets)

    def survivors(self, mean: Tensor, kept: Tensor, solver: Solver) -> tuple[Tensor, Solve]:
        """Compute the conditional mean given zeros where `kept` is False.

        Args:
            mean: the weights before the cut, (groups, outputs, inputs), float64.
            kept: True = kept, of the same shape.
            solver: when conjugate gradients stop.
        """
        rhs = self.product(mean * ~kept) * kept
        by_rows = self.outputs is None
        if by_rows:  # systems are the last two dimensions: every row by itself
            rhs, kept_rows = rhs[:, :, None], kept[:, :, None]

            def product(v: Tensor) -> Tensor:
                return (self.product((v * kept_rows)[:, :, 0]) * kept)[:, :, None]

            def precondition(r: Tensor) -> Tensor:
                return r / self.diagonal[:, :, None] * kept_rows
        else:

            def product(v: Tensor) -> Tensor:
                return self.product(v * kept) * kept

            def precondition(r: Tensor) -> Tensor:
                return r / self.diagonal * kept

        found = conjugate_gradients(product, rhs, precondition, solver)
        off, size = rhs - product(found.value), dot(rhs, rhs)
        total = float(size.sum())
        residual = (float(dot(off, off).sum()) / total) ** 0.5 if total > 0 else 0.0
        moved = found.value[:, :, 0] if by_rows else found.value
        return (mean + moved).masked_fill(~kept, 0), Solve(
            "row" if by_rows else "joint", found.iterations, residual, found.converged
        )


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
