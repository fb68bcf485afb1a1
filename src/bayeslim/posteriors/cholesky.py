"""Cholesky factors that survive rounding: a second try in float64, then the smallest jitter that works."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from bayeslim.errors import BayeslimWarning, NotPositiveDefinite

JITTERS = (1e-12, 1e-10, 1e-8, 1e-6)
"""What may be added to a diagonal, relative to its mean, when float64 alone is not enough."""


def cholesky(matrix: Tensor) -> tuple[Tensor, float]:
    """The lower factor of a symmetric positive-definite matrix (..., n, n), and the relative jitter it needed.

    Works in the matrix's dtype, then in float64, then with jitter and a warning.

    Raises:
        NotPositiveDefinite: when even the largest jitter is not enough.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not bool(info.any()):
        return factor, 0.0
    wide = matrix.double()
    factor, info = torch.linalg.cholesky_ex(wide)
    if not bool(info.any()):
        return factor.to(matrix.dtype), 0.0
    diagonal = wide.diagonal(dim1=-2, dim2=-1)
    size = diagonal.abs().mean(-1, keepdim=True)
    for jitter in JITTERS:
        factor, info = torch.linalg.cholesky_ex(wide + torch.diag_embed((jitter * size).expand_as(diagonal)))
        if not bool(info.any()):
            warnings.warn(
                f"A precision was singular to rounding: {jitter:g} of its mean diagonal was added. "
                "A larger prior precision avoids this.",
                BayeslimWarning,
                stacklevel=2,
            )
            return factor.to(matrix.dtype), jitter
    raise NotPositiveDefinite(
        f"A precision must be positive definite. Got one of shape {tuple(matrix.shape)} that is not, even with "
        f"{JITTERS[-1]:g} of its mean diagonal added. Use a larger prior precision."
    )
