"""The low-rank Gaussian: precision P = U diag(s) Uᵀ + diag(δ), the curvature's top directions and a Normal prior.

With B = diag(δ)^(-1/2) U diag(s)^(1/2) and C = I + BᵀB (k × k), by Woodbury and the determinant lemma

    P⁻¹ = diag(δ)^(-1/2) (I − B C⁻¹ Bᵀ) diag(δ)^(-1/2)        log|P| = Σ log δ + log|C|.

A sample is P⁻¹ r with r = diag(δ)^(1/2) ε + U diag(s)^(1/2) η ~ N(0, P). Conditioning keeps rows of U: exact, and
low-rank again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bayeslim.errors import NotPositiveDefinite, ShapeMismatch
from bayeslim.io.registry import register
from bayeslim.posteriors import prior_precision as priors
from bayeslim.posteriors.base import keyed, like_means, unkeyed
from bayeslim.posteriors.cholesky import cholesky
from bayeslim.posteriors.conjugate import Solver
from bayeslim.posteriors.flat import FlatLayout
from bayeslim.posteriors.gaussian import Gaussian, Restriction
from bayeslim.posteriors.prior_precision import PriorPrecision
from bayeslim.types import Params


@register("posterior")
class LowRank(Gaussian):
    """A Gaussian with a low-rank plus diagonal precision.

    Args:
        mean: μ by name, D weights together.
        factor: U, (D, k), parameter by parameter in the mean's order; its columns need not be orthogonal.
        eigenvalues: s ≥ 0, (k,); below zero by rounding counts as zero.
        prior_precision: δ > 0, of any form down to one value a weight.

    All solves are in float64.
    """

    kind: ClassVar[str] = "lowrank"

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        factor: Tensor,
        eigenvalues: Tensor,
        prior_precision: PriorPrecision = 1.0,
    ):
        self._mean = dict(mean)
        self.layout = FlatLayout.of(self._mean)
        self.factor = factor if factor.dtype == torch.float64 else factor.float()
        self.eigenvalues = eigenvalues.to(self.factor)
        self.prior_precision = prior_precision
        if factor.ndim != 2 or eigenvalues.ndim != 1 or factor.shape != (self.layout.size, len(eigenvalues)):
            raise ShapeMismatch(
                f"The factor must be ({self.layout.size}, k), one row for each weight, with k eigenvalues. "
                f"Got {tuple(factor.shape)} and {tuple(eigenvalues.shape)}."
            )
        lowest, highest = (float(f(self.eigenvalues)) if len(eigenvalues) else 0.0 for f in (torch.min, torch.max))
        if not lowest >= -1e-3 * max(highest, 0.0):
            raise NotPositiveDefinite(f"The eigenvalues must not be negative. Got {lowest:.3g} to {highest:.3g}.")
        resolved = priors.resolve(prior_precision, self._mean)
        wide = self.factor.double()
        self.prior = self.layout.vector(priors.diagonal(resolved, self._mean, wide), wide)
        if not bool((self.prior > 0).all()):
            raise NotPositiveDefinite("A low-rank precision needs a prior precision above zero everywhere.")
        self.root = wide * self.eigenvalues.double().clamp(min=0).sqrt()
        self.kept = KeptRows(self, torch.ones_like(self.prior, dtype=torch.bool))

    @property
    def variance(self) -> Params:
        """The diagonal of P⁻¹."""
        return like_means(self.kept.variance(), self._mean)

    def precision_product(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P v."""
        v = self.layout.vector(params, self.prior)
        return self.layout.params((v @ self.root) @ self.root.mT + self.prior * v)

    def covariance_product(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P⁻¹ v."""
        return self.kept.solve(params)

    def log_det_precision(self) -> Tensor:
        """Compute log|P|."""
        return self.kept.log_det()

    def noise(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Draw P⁻¹ r with r ~ N(0, P)."""
        lead = () if n is None else (n,)
        white = self.root.new_empty((*lead, sum(self.root.shape))).normal_(generator=generator)
        prior, data = white.split(self.root.shape, -1)
        return self.layout.params(self.kept.solve_vector(prior * self.prior.sqrt() + data @ self.root.mT))

    def restrict(self, kept: Mapping[str, Tensor], solver: Solver) -> KeptRows:
        """Restrict P to the kept weights; it stays low-rank."""
        return KeptRows(self, self.layout.vector(kept, self.prior).bool())

    def with_prior_precision(self, prior_precision: PriorPrecision) -> LowRank:
        """Keep the curvature, and take another prior precision."""
        return LowRank(self._mean, self.factor, self.eigenvalues, prior_precision)

    def tensors(self) -> Params:
        """Collect means, directions, eigenvalues and prior precision."""
        own = {"factor": self.factor.detach().contiguous(), "eigenvalues": self.eigenvalues.detach().contiguous()}
        return keyed(mean=self._mean) | own | priors.to_tensors(self.prior_precision)

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Build it again from `tensors()`."""
        prior = priors.from_tensors(tensors)
        return cls(unkeyed(tensors, "mean"), tensors["factor"], tensors["eigenvalues"], prior)


class KeptRows(Restriction):
    """P_RR of a low-rank posterior by Woodbury on the kept rows of U."""

    def __init__(self, base: LowRank, kept: Tensor):
        self.base = base
        self.mask = kept
        self.whitened = base.root * (kept / base.prior.sqrt())[:, None]
        capacitance = self.whitened.mT @ self.whitened
        self.factor, _ = cholesky(capacitance + torch.eye(len(capacitance)).to(capacitance))

    def solve_vector(self, v: Tensor) -> Tensor:
        """Compute P_RR⁻¹ v_R of a vector (..., D)."""
        v = v * self.mask / self.base.prior.sqrt()
        inner = torch.cholesky_solve((v @ self.whitened)[..., None], self.factor)[..., 0]
        return (v - inner @ self.whitened.mT) / self.base.prior.sqrt()

    def solve(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P_RR⁻¹ v_R."""
        return self.base.layout.params(self.solve_vector(self.base.layout.vector(params, self.base.prior)))

    def log_det(self) -> Tensor:
        """Compute log|P_RR|."""
        inner = 2 * self.factor.diagonal().double().log().sum()
        return (inner + self.base.prior[self.mask].double().log().sum()).cpu()

    def variance(self) -> Params:
        """Compute the diagonal of P_RR⁻¹."""
        explained = torch.linalg.solve_triangular(self.factor, self.whitened.mT, upper=False).square().sum(0)
        return self.base.layout.params((1 - explained) * self.mask / self.base.prior)
