"""Noise that the units of a layer have in common: the leading part of their covariance.

    Cov[z] ≈ diag(p) + D U A Uᵀ D

Units that read the same noisy inputs move together, and the next layer adds that up: with independent units the spread
of the outputs comes out a fifth too small in the second hidden layer of a perceptron. What counts of it lives in few
directions U, those in which the mean weights stretch their inputs most (the leading left singular vectors of μ), the
same for all inputs; their covariance A and the slopes D of the activations passed since are each input's own. Carrying
them costs R² instead of one number for every unit, and a layer of at most `EXACT` units has its whole covariance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RANK = 8
"""Directions kept of a wide layer."""

EXACT = 16
"""A layer of up to so many units keeps all of them."""


@dataclass(frozen=True)
class Common:
    """Shared noise of the units of a layer.

    Attributes:
        basis: U, (units, R).
        core: A, (..., R, R).
        slope: D, (..., units), or None for ones.
    """

    basis: Tensor
    core: Tensor
    slope: Tensor | None = None

    def scaled(self, by: Tensor) -> Common:
        """Every unit multiplied by a number."""
        return Common(self.basis, self.core, by if self.slope is None else self.slope * by)

    def variance(self) -> Tensor:
        """Its part of the variance of every unit, (..., units)."""
        along = self.core.flatten(-2) @ _pairs(self.basis, self.basis).T
        return along if self.slope is None else along.mul_(self.slope.square())

    def root(self) -> Tensor:
        """F with F Fᵀ its covariance, (..., units, R)."""
        factor = self.basis @ _cholesky(self.core)
        return factor if self.slope is None else factor.mul_(self.slope.unsqueeze(-1))


def through_linear(variance: Tensor, common: Common | None, weight: Tensor) -> tuple[Tensor, Common]:
    """What a linear layer with known weights, (O, J), makes of noise in its inputs, (..., J)."""
    basis = leading(weight)
    inwards = basis.T @ weight  # (R, J)
    private = variance if common is None else (variance - common.variance()).clamp_(min=0)
    shape = (len(inwards), len(inwards))
    core = (private @ _pairs(inwards.T, inwards.T)).unflatten(-1, shape)
    spread = private @ weight.square().T
    if common is not None:
        if common.slope is None:
            turned = inwards @ common.basis
        else:
            turned = (common.slope @ _pairs(inwards.T, common.basis)).unflatten(-1, (shape[0], common.basis.shape[1]))
        carried = turned @ common.core @ turned.mT
        spread = spread + carried.flatten(-2) @ _pairs(basis, basis).T
        core = core + carried
    return spread, Common(basis, core)


def leading(weight: Tensor) -> Tensor:
    """Orthonormal directions of the outputs in which a weight matrix stretches most, (O, R), by subspace iteration."""
    outputs = len(weight)
    if outputs <= EXACT:
        return torch.eye(outputs, dtype=weight.dtype, device=weight.device)
    start = torch.randn(outputs, RANK, generator=torch.Generator().manual_seed(0)).to(weight)
    for _ in range(2):
        start = torch.linalg.qr(weight @ (weight.T @ start)).Q
    return start


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """All products of a column of each, (J, R · S): quadratic forms become matrix products."""
    return (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(1)


def _cholesky(core: Tensor) -> Tensor:
    """A root of each matrix; of what rounding has left of it where that is not positive."""
    tiny = 1e-6 if core.dtype == torch.float32 else 1e-12
    diagonal = core.diagonal(dim1=-2, dim2=-1)
    jitter = (tiny * diagonal.mean(-1, keepdim=True)).clamp(min=torch.finfo(core.dtype).tiny)
    root: Tensor
    root, info = torch.linalg.cholesky_ex(core + torch.diag_embed(jitter.expand(diagonal.shape)))
    if bool(info.any()):
        values, vectors = torch.linalg.eigh(core)
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    return root
