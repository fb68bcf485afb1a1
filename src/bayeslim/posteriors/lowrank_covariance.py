"""The Gaussian with a low-rank plus diagonal *covariance*: N(μ, diag(σ²) + U Uᵀ), as `LowRankGaussian` fits it.

It is w = μ + σ ε + U z with z ~ N(0, I_r) shared by all weights. The zeros S inform the other weights
through z alone. Given w_S = 0,

    z ~ N(m, C),    C = (I + U_Sᵀ diag(σ_S²)⁻¹ U_S)⁻¹,    m = −C U_Sᵀ diag(σ_S²)⁻¹ μ_S,

and the survivors are N(μ_R + U_R m, diag(σ_R²) + U_R C U_Rᵀ): of the same form and rank again. (`LowRank`, of Laplace,
has the low-rank plus diagonal *precision*.)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor

from bayeslim.errors import NotPositiveDefinite, ShapeMismatch
from bayeslim.io.registry import register
from bayeslim.noise import standard_normals_like
from bayeslim.posteriors.base import check_masks, keyed, unkeyed
from bayeslim.posteriors.conjugate import Solver
from bayeslim.posteriors.flat import FlatLayout
from bayeslim.posteriors.gaussian import Gaussian, How, Restriction
from bayeslim.posteriors.prior_precision import PriorPrecision
from bayeslim.types import Params


@register("posterior")
class LowRankCovariance(Gaussian):
    """A Gaussian with a low-rank plus diagonal covariance.

    Args:
        mean: μ by name.
        std: σ by name, of the same shapes. Where σ and U are zero a weight is a point mass; σ = 0 alone is refused.
        factor: U by name, (r, *shape).
    """

    kind: ClassVar[str] = "lowrank_covariance"

    def __init__(self, mean: Mapping[str, Tensor], std: Mapping[str, Tensor], factor: Mapping[str, Tensor]):
        self._mean = dict(mean)
        self.own_std = {name: std[name] for name in self._mean}
        self.factor = {name: factor[name] for name in self._mean}
        self.layout = FlatLayout.of(self._mean)
        ranks = {len(t) for t in self.factor.values()}
        for name, value in self._mean.items():
            if len(ranks) != 1 or std[name].shape != value.shape or factor[name].shape[1:] != value.shape:
                raise ShapeMismatch(
                    f'"{name}" of shape {tuple(value.shape)} needs a spread of that shape and directions (r, *shape). '
                    f"Got {tuple(std[name].shape)} and {tuple(factor[name].shape)}."
                )
        like = torch.empty((), dtype=torch.float64, device=next(iter(self._mean.values())).device)
        self.sigma = self.layout.vector(self.own_std, like)
        self.directions = self.layout.vector(self.factor, like)
        self.random = self.sigma > 0
        if bool((self.directions[:, ~self.random] != 0).any()):
            raise NotPositiveDefinite("A weight without a spread of its own, σ = 0, must have no part in U either.")

    @property
    def variance(self) -> Params:
        """σ² + Σⱼ U²ᵢⱼ."""
        variance = self.layout.params(self.sigma.square() + self.directions.square().sum(0))
        return {name: variance[name].to(std.dtype) for name, std in self.own_std.items()}

    @property
    def support(self) -> Params:
        """Masks of the random weights: those with a spread."""
        return {name: std > 0 for name, std in self.own_std.items()}

    @cached_property
    def scaled(self) -> Tensor:
        """B = diag(σ)⁻¹ U, (r, D); zero at point masses."""
        return torch.where(self.random, self.directions / self.sigma.where(self.random, 1.0), 0.0)

    @cached_property
    def root(self) -> Tensor:
        """The Cholesky factor of M = I + BᵀB, (r, r)."""
        return _root(self.scaled)

    def covariance_product(self, params: Mapping[str, Tensor]) -> Params:
        """Compute Σ v."""
        v = self.layout.vector(params, self.sigma)
        return self.layout.params(self.sigma.square() * v + (v @ self.directions.mT) @ self.directions)

    def precision_product(self, params: Mapping[str, Tensor]) -> Params:
        """Compute Σ⁻¹ v by Woodbury, zero at point masses."""
        inverse = torch.where(self.random, 1 / self.sigma.where(self.random, 1.0), 0.0)
        v = self.layout.vector(params, self.sigma) * inverse
        inner = torch.cholesky_solve((v @ self.scaled.mT)[..., None], self.root)[..., 0]
        return self.layout.params((v - inner @ self.scaled) * inverse)

    def log_det_precision(self) -> Tensor:
        """Compute −log|Σ| = −Σ 2 log σ − log|M|."""
        return -2 * (self.sigma[self.random].log().sum() + self.root.diagonal().log().sum()).cpu()

    def noise(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Draw σ ε + U z."""
        lead = () if n is None else (n,)
        spreads = {name: std.expand((*lead, *std.shape)) for name, std in self.own_std.items()}
        latent = self.directions.new_empty((*lead, len(self.directions)))
        white = standard_normals_like(spreads | {"": latent}, ["", *spreads], generator=generator)
        along = self.layout.params(white[""] @ self.directions)
        return {name: along[name].to(std.dtype) + std * white[name] for name, std in self.own_std.items()}

    def restrict(self, kept: Mapping[str, Tensor], solver: Solver) -> GivenZeros:
        """Restrict P to the kept weights: the inverse is the covariance given the zeros."""
        return GivenZeros(self.condition(kept))

    def condition(  # type: ignore[override]
        self,
        masks: Mapping[str, Tensor],
        how: How = "joint",
        *,
        tolerance: float = Solver.tolerance,
        max_iterations: int = Solver.max_iterations,
    ) -> LowRankCovariance:
        """Condition on w = 0 wherever a mask is False, exactly and in the same form.

        The solver's options are not used.
        """
        if how == "row":
            self.rowwise_mean(masks)
        kept = check_masks(masks, self._mean)
        left = self.layout.vector(kept, self.sigma)
        zero = self.random & (left == 0)
        B = self.scaled * zero
        known = torch.where(zero, self.layout.vector(self._mean, self.sigma) / self.sigma.where(zero, 1.0), 0.0)
        root = _root(B)
        latent = -torch.cholesky_solve((B @ known)[:, None], root)[:, 0]
        moved = self.layout.params((latent @ self.directions) * left)
        # C = (L Lᵀ)⁻¹ = L⁻ᵀ L⁻¹, so the new directions are L⁻¹ of the old ones
        turned = torch.linalg.solve_triangular(root, self.directions, upper=False) if bool(zero.any()) else None
        factor = self.factor if turned is None else self.layout.params(turned * left)
        return LowRankCovariance(
            {n: ((value.double() + moved[n]) * kept[n]).to(value.dtype) for n, value in self._mean.items()},
            {n: std * kept[n] for n, std in self.own_std.items()},
            {n: factor[n].to(value.dtype) * kept[n] for n, value in self.factor.items()},
        )

    def with_prior_precision(self, prior_precision: PriorPrecision) -> NoReturn:
        """Raise: this family does not keep its prior apart."""
        raise TypeError("A fitted covariance does not keep its prior apart: fit again with another prior.")

    def tensors(self) -> Params:
        """Collect means, spreads and directions."""
        return keyed(mean=self._mean, std=self.own_std, factor=self.factor)

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Build it again from `tensors()`."""
        return cls(*(unkeyed(tensors, group) for group in ("mean", "std", "factor")))


class GivenZeros(Restriction):
    """P_RR, known by its inverse."""

    def __init__(self, conditional: LowRankCovariance):
        self.conditional = conditional

    def solve(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P_RR⁻¹ v_R."""
        return self.conditional.covariance_product(params)

    def log_det(self) -> Tensor:
        """Compute log|P_RR|."""
        return self.conditional.log_det_precision()

    def variance(self) -> Params:
        """Compute the diagonal of P_RR⁻¹."""
        return self.conditional.variance


def _root(B: Tensor) -> Tensor:
    """Factor I + B Bᵀ by Cholesky."""
    root: Tensor = torch.linalg.cholesky(B @ B.mT + torch.eye(len(B), dtype=B.dtype, device=B.device))
    return root
