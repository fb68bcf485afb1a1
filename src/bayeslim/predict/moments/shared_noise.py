"""Noise that the units of a layer have in common: the leading part of their covariance.

    Cov[z] ≈ diag(p) + D U A Uᵀ D

Units that read the same noisy inputs are correlated, and the next layer sums them: with independent units the spread
of the outputs of a perceptron with two hidden layers is a quarter too small. Most of the covariance lies in the few
directions U in which the mean weights stretch their inputs most (the leading left singular vectors of μ), the same for
all inputs. Their covariance A and the slopes D of the activations since then are each input's own. This takes R²
numbers an input, and a layer of at most `MAX_EXACT_UNITS` units has its whole covariance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslim.predict.links import root_of

RANK = 8
"""Directions kept of a wide layer."""

MAX_EXACT_UNITS = 16
"""A layer of up to this many units keeps its whole covariance."""


@dataclass(frozen=True)
class SharedNoise:
    """Shared noise of the units of a layer, for N inputs.

    Attributes:
        basis: U, (units, R).
        core: A, (R, R, N): the inputs last, so that small matrices are worked on in long vectors.
        slope: D, (N, units), or None for ones.
    """

    basis: Tensor
    core: Tensor
    slope: Tensor | None = None

    def scaled(self, by: Tensor) -> SharedNoise:
        """Multiply every unit by a number, (..., units)."""
        by = by.reshape(-1, len(self.basis))
        return SharedNoise(self.basis, self.core, by if self.slope is None else self.slope * by)

    def variance(self) -> Tensor:
        """Compute its part of the variance of every unit, (N, units)."""
        i, j = _pairs(self.basis.shape[1])
        along = self.core[i, j].T @ (self.basis[:, i] * self.basis[:, j] * torch.where(i == j, 1, 2)).T
        return along if self.slope is None else along.mul_(self.slope.square())

    def covariance(self) -> Tensor:
        """Compute D U A Uᵀ D, (N, units, units), for a layer that is not wide."""
        half = torch.tensordot(self.basis, self.core, 1)
        whole: Tensor = torch.tensordot(self.basis, half, ([1], [1])).movedim(-1, 0)
        return whole if self.slope is None else self.slope.unsqueeze(-1) * whole * self.slope.unsqueeze(-2)

    def root(self) -> Tensor:
        """Compute F with F Fᵀ the covariance, (N, units, R)."""
        factor: Tensor = (root_of(self.core.movedim(-1, 0), torch.finfo(self.core.dtype).tiny).mT @ self.basis.T).mT
        return factor if self.slope is None else factor * self.slope.unsqueeze(-1)


def through_linear(variance: Tensor, common: SharedNoise | None, weight: Tensor) -> tuple[Tensor, SharedNoise]:
    """Propagate noise in inputs, (..., J), through known weights, (O, J)."""
    private = variance.reshape(-1, weight.shape[1])
    if common is not None:
        private = (private - common.variance()).clamp_(min=0)
    basis = leading(weight)
    inwards = basis.T @ weight  # (R, J)
    core = _weighted_products(inwards, private)
    spread = private @ weight.square().T
    if common is not None:
        old = common.basis.T
        if common.slope is None:
            turned = (inwards @ old.T).unsqueeze(-1)
        else:  # (R, old R, N)
            turned = ((inwards.unsqueeze(1) * old).flatten(0, 1) @ common.slope.T).unflatten(0, (len(inwards), -1))
        half = (turned.unsqueeze(2) * common.core).sum(1)
        carried = SharedNoise(basis, (half.unsqueeze(1) * turned).sum(2))
        spread += carried.variance()
        core += carried.core
    return spread.view(*variance.shape[:-1], -1), SharedNoise(basis, core)


def leading(weight: Tensor) -> Tensor:
    """Find leading left singular vectors of a weight, (O, R), by subspace iteration."""
    outputs = len(weight)
    if outputs <= MAX_EXACT_UNITS:
        return torch.eye(outputs, dtype=weight.dtype, device=weight.device)
    start = torch.randn(outputs, RANK, generator=torch.Generator().manual_seed(0)).to(weight)
    for _ in range(2):
        start = torch.linalg.qr(weight @ (weight.T @ start)).Q
    return start


def _weighted_products(rows: Tensor, weights: Tensor) -> Tensor:
    """Compute Σ_j w_nj r_aj r_bj, (R, R, N), of rows (R, J) and weights (N, J)."""
    i, j = _pairs(len(rows))
    half = (rows[i] * rows[j]) @ weights.T
    products = half.new_empty(len(rows), len(rows), len(weights))
    products[i, j] = half
    products[j, i] = half
    return products


def _pairs(count: int) -> tuple[Tensor, Tensor]:
    """List the indices of the lower triangle of a symmetric matrix."""
    i, j = torch.tril_indices(count, count)
    return i, j
