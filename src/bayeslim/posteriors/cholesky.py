"""Cholesky factors in float64 that survive rounding: of the equilibrated matrix, with the smallest jitter that works.

With D = diag(M), D^(-1/2) M D^(-1/2) has a unit diagonal, so that weights of very different scales are factored alike,
and a jitter on that diagonal is relative to each weight's own scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayeslim.errors import NotPositiveDefinite

JITTERS = (1e-15, 1e-14, 1e-13, 1e-12, 1e-10, 1e-8, 1e-6)
"""Amounts added to a unit diagonal, smallest first."""


def cholesky(matrix: Tensor) -> tuple[Tensor, float]:
    """Factor symmetric positive-definite matrices (..., n, n) in float64.

    Returns:
        the lower factors in float64, and the relative jitter that was needed.

    Raises:
        NotPositiveDefinite: when the matrix is not finite, or the largest jitter is not enough.
    """
    wide = matrix.double()
    factor, info = torch.linalg.cholesky_ex(wide)
    if not bool(info.any()) and bool(torch.isfinite(factor.diagonal(dim1=-2, dim2=-1)).all()):
        return factor, 0.0
    if not bool(torch.isfinite(wide).all()):
        raise NotPositiveDefinite(
            f"A precision must be finite. Got one of shape {tuple(matrix.shape)} with NaN or infinite entries: check "
            "the data and the network's weights."
        )
    diagonal = wide.diagonal(dim1=-2, dim2=-1)
    scale = diagonal.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    scaled = wide / scale[..., :, None] / scale[..., None, :]
    for jitter in JITTERS:
        factor, info = torch.linalg.cholesky_ex(scaled + torch.diag_embed(torch.full_like(diagonal, jitter)))
        if not bool(info.any()):
            return factor * scale[..., :, None], jitter
    raise NotPositiveDefinite(
        f"A precision must be positive definite. Got one of shape {tuple(matrix.shape)} that is not, even with its "
        f"diagonal raised by {JITTERS[-1]:g} of itself. Pass a curvature without negative eigenvalues, or a larger "
        "prior precision."
    )
