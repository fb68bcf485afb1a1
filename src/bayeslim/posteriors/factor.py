"""A symmetric positive semi-definite matrix, known by its eigendecomposition Q diag(λ) Qᵀ, in float64.

One factor may hold a matrix for each group of a grouped convolution, (groups, n, n), or only a diagonal: the input
factor of an embedding is diagonal, and as large as the vocabulary. Solves with products of two such matrices need
float64: in float32 the small eigenvalues of an ill-conditioned factor are rounding errors of the large ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bayeslim.errors import NotPositiveDefinite, ShapeMismatch

MAX_NEGATIVE_RATIO = {torch.float64: 1e-8}
"""Eigenvalues down to minus this fraction of the largest count as rounding errors, by the dtype of the matrix."""
MAX_NEGATIVE_RATIO_OF_OTHERS = 1e-3


@dataclass(frozen=True, eq=False)
class Factor:
    """Eigenvalues and eigenvectors of one side of a Kronecker product.

    Attributes:
        values: eigenvalues ≥ 0, (groups, n), float64.
        vectors: eigenvectors in columns, (groups, n, n), float64; None stands for the identity, a diagonal matrix.
    """

    values: Tensor
    vectors: Tensor | None

    def __post_init__(self) -> None:
        shape = self.values.shape
        if len(shape) != 2 or (self.vectors is not None and self.vectors.shape != (*shape, shape[1])):
            got = None if self.vectors is None else tuple(self.vectors.shape)
            raise ShapeMismatch(
                f"A factor needs eigenvalues (groups, n) and eigenvectors (groups, n, n). Got {tuple(shape)} and {got}."
            )
        object.__setattr__(self, "values", self.values.double())
        if self.vectors is not None:
            object.__setattr__(self, "vectors", self.vectors.double())

    @classmethod
    def restore(cls, values: Tensor, vectors: Tensor | None) -> Factor:
        """Build a factor from stored values, which are not trusted.

        Raises:
            NotPositiveDefinite: if they are not finite, or an eigenvalue is negative.
        """
        if not bool(torch.isfinite(values).all()) or not bool((values >= 0).all()):
            raise NotPositiveDefinite("The stored eigenvalues of a factor must be finite and not negative.")
        if vectors is not None and not bool(torch.isfinite(vectors).all()):
            raise NotPositiveDefinite("The stored eigenvectors of a factor must be finite.")
        return cls(values, vectors)

    @classmethod
    def of(cls, matrix: Tensor, what: str = "factor") -> Factor:
        """Decompose a matrix (n, n), one a group (groups, n, n), or a diagonal (n,).

        Eigenvalues below zero by rounding become zero: a rank-deficient or all-zero factor (a unit that is never
        active) is fine.

        Raises:
            ShapeMismatch: if it is not square.
            NotPositiveDefinite: if it is not finite, or has eigenvalues below zero beyond rounding.
        """
        square = matrix.ndim in (2, 3) and matrix.shape[-1] == matrix.shape[-2]
        if not square and matrix.ndim != 1:
            raise ShapeMismatch(
                f"The {what} must be (n, n), (groups, n, n), or a diagonal (n,). Got {tuple(matrix.shape)}."
            )
        if not bool(torch.isfinite(matrix).all()):
            raise NotPositiveDefinite(
                f"The {what} must be finite. Got infinite or undefined entries: check the data, or accumulate the "
                "curvature in a wider dtype."
            )
        vectors: Tensor | None = None
        if matrix.ndim == 1:
            values = matrix.double()[None]
        else:
            wide = matrix.double().reshape(-1, *matrix.shape[-2:])
            values, vectors = torch.linalg.eigh((wide + wide.mT) / 2)
            vectors = vectors.contiguous()
        rounding = MAX_NEGATIVE_RATIO.get(matrix.dtype, MAX_NEGATIVE_RATIO_OF_OTHERS)
        lowest, highest = float(values.detach().min()), float(values.detach().max())
        if lowest < -rounding * max(highest, 0.0):
            raise NotPositiveDefinite(
                f"The {what} must be positive semi-definite. Got eigenvalues from {lowest:.3g} to {highest:.3g}."
            )
        return cls(values.clamp(min=0), vectors)

    @property
    def groups(self) -> int:
        """The number of its matrices."""
        return self.values.shape[0]

    @property
    def size(self) -> int:
        """The number of rows of each of its matrices."""
        return self.values.shape[1]

    @cached_property
    def matrix(self) -> Tensor:
        """Q diag(λ) Qᵀ, (groups, n, n)."""
        if self.vectors is None:
            return torch.diag_embed(self.values)
        return (self.vectors * self.values[:, None, :]) @ self.vectors.mT

    @cached_property
    def diagonal(self) -> Tensor:
        """The diagonal of the matrix, (groups, n)."""
        return self.values if self.vectors is None else self.spread(self.values[..., None])[..., 0]

    def times(self, x: Tensor) -> Tensor:
        """Multiply the matrix with `x`, (..., groups, n, m)."""
        return self.values[..., None] * x if self.vectors is None else self.matrix @ x

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate into the eigenbasis: Qᵀ x."""
        return x if self.vectors is None else self.vectors.mT @ x

    def rotate_back(self, x: Tensor) -> Tensor:
        """Rotate out of the eigenbasis: Q x."""
        return x if self.vectors is None else self.vectors @ x

    def spread(self, x: Tensor) -> Tensor:
        """Spread variances in the eigenbasis over the coordinates: (Q ∘ Q) x."""
        return x if self.vectors is None else self.vectors.square() @ x

    def entries(self, group: Tensor | int, rows: Tensor, columns: Tensor) -> Tensor:
        """Gather entries of the groups' matrices at `rows`, `columns`, which broadcast."""
        if self.vectors is None:
            return torch.where(rows == columns, self.values[group, rows], 0.0)
        return self.matrix[group, rows, columns]

    def rescaled(self, scale: Tensor) -> Factor:
        """Decompose diag(s)⁻¹ M diag(s)⁻¹, for s of shape (groups, n)."""
        if self.vectors is None:
            return Factor(self.values / scale.square(), None)
        # The product of a root with itself has rounding errors in proportion to its own rows, whatever their scales.
        root = self.vectors * self.values.sqrt()[:, None, :] / scale[:, :, None]
        return Factor.of(root @ root.mT)

    def shifted(self, shift: Tensor) -> Factor:
        """Add shift·I, for shifts (groups, 1)."""
        return Factor(self.values + shift, self.vectors)
