"""Correlated Gaussians N(μ, P⁻¹) over named parameters, each family known by products with its precision P.

Conditioning on zeros is the same for all of them. With R the kept weights and S the cut ones, a point w moves to

    T(w)_R = w_R + P_RR⁻¹ P_RS w_S,        T(w)_S = 0,

so that T(μ) is the conditional mean, and T of a sample is a sample of the conditional (Matheron's rule). A family only
says how it solves with P_RR: its `restrict`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol, Self

import torch
from torch import Tensor

from bayeslim.errors import ShapeMismatch
from bayeslim.posteriors.base import Posterior, check_masks
from bayeslim.posteriors.conjugate import Solver
from bayeslim.posteriors.prior_precision import PriorPrecision
from bayeslim.types import Params

if TYPE_CHECKING:
    from bayeslim.posteriors.conditioned import Conditioned

How = Literal["joint", "row"]


class Restriction(Protocol):
    """P_RR, the precision of the kept weights; everything is by name and zero where cut."""

    def solve(self, params: Mapping[str, Tensor]) -> Params:
        """P_RR⁻¹ v_R; leading dimensions are separate right-hand sides."""

    def log_det(self) -> Tensor:
        """log|P_RR|."""

    def variance(self) -> Params:
        """The diagonal of P_RR⁻¹."""


class Gaussian(Posterior):
    """A Gaussian with precision P. Products take one parameter setting, or several stacked in front."""

    @abstractmethod
    def precision_product(self, params: Mapping[str, Tensor]) -> Params:
        """P v."""

    @abstractmethod
    def covariance_product(self, params: Mapping[str, Tensor]) -> Params:
        """P⁻¹ v."""

    @abstractmethod
    def log_det_precision(self) -> Tensor:
        """log|P| over the random weights, differentiable in a prior precision that requires gradients."""

    @abstractmethod
    def noise(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """One draw, or `n` stacked in front, of N(0, P⁻¹)."""

    @abstractmethod
    def restrict(self, kept: Mapping[str, Tensor], solver: Solver) -> Restriction:
        """P_RR for a boolean mask of every parameter, True = kept."""

    @abstractmethod
    def with_prior_precision(self, prior_precision: PriorPrecision) -> Self:
        """The same curvature and mean under another prior precision."""

    @property
    def support(self) -> Params:
        """Which weights are random, as booleans by name; the others are point masses at the mean."""
        return {name: torch.ones_like(value, dtype=torch.bool) for name, value in self.mean.items()}

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """μ + P^(-1/2) ε, in the mean's dtype."""
        noise = self.noise(n, generator=generator)
        return {name: (value + noise[name]).to(value.dtype) for name, value in self.mean.items()}

    def quadratic(self, params: Mapping[str, Tensor]) -> Tensor:
        """(w − μ)ᵀ P (w − μ), a scalar."""
        off = {name: params[name].double() - value.double() for name, value in self.mean.items()}
        image = self.precision_product(off)
        total = torch.zeros((), dtype=torch.float64)
        for name, value in off.items():
            total = total + (value * image[name]).sum().cpu()
        return total

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """½ log|P| − ½ (w − μ)ᵀ P (w − μ) − n/2 log 2π; −∞ where a point mass is missed."""
        count = 0
        for name, random in self.support.items():
            value = params[name]
            if value.shape != random.shape:
                raise ShapeMismatch(f'"{name}" must be {tuple(random.shape)}. Got {tuple(value.shape)}.')
            count += int(random.sum())
            if bool((~random & (value != self.mean[name])).any()):
                return torch.full((), -torch.inf, dtype=torch.float64)
        return 0.5 * (self.log_det_precision() - self.quadratic(params) - count * math.log(2 * math.pi))

    def functional_covariance(self, jacobian: Mapping[str, Tensor]) -> Tensor:
        """J P⁻¹ Jᵀ of materialised Jacobians.

        Args:
            jacobian: (B, C, *shape) by name.

        Returns:
            (B, C, C).
        """
        flat = {name: value.flatten(0, 1) for name, value in jacobian.items()}
        image = self.covariance_product(flat)
        covariance: Tensor | float = 0.0
        for name, value in jacobian.items():
            left = value.flatten(2).to(image[name])
            covariance = covariance + left @ image[name].reshape(left.shape).mT
        return torch.as_tensor(covariance)

    def condition(
        self,
        masks: Mapping[str, Tensor],
        how: How = "joint",
        *,
        tolerance: float = Solver.tolerance,
        max_iterations: int = Solver.max_iterations,
    ) -> Conditioned:
        """The posterior given w = 0 wherever a mask is False: survivors move to where the precision wants them.

        Args:
            masks: by name, True = kept; parameters without a mask are kept whole.
            how: "joint" solves for all survivors of a layer together, the definition. "row" (Kronecker only) solves
                each output's row on the input factor alone: faster at high sparsity, exact only if the output factor
                is diagonal. It decides where the mean goes; the covariance is that of P_RR either way.
            tolerance: relative residual at which conjugate gradients stop (Kronecker only).
            max_iterations: most iterations of conjugate gradients; a warning when they do not suffice.
        """
        from bayeslim.posteriors.conditioned import Conditioned

        if how not in ("joint", "row"):
            raise ValueError(f'how must be "joint" or "row". Got {how!r}.')
        kept = check_masks(masks, self.mean)
        solver = Solver(tolerance, max_iterations)
        if how == "row":
            mean = self.rowwise_mean(kept)
        else:
            mean = survivors(self, self.restrict(kept, solver), kept, self.mean)
        return Conditioned(self, kept, {name: value.to(self.mean[name].dtype) for name, value in mean.items()}, solver)

    def rowwise_mean(self, kept: Mapping[str, Tensor]) -> Params:
        """The conditional mean with each output's row on its own; only families with rows have one."""
        raise ValueError(
            f'how="row" needs a Kronecker posterior. {type(self).__name__} is solved exactly by how="joint".'
        )


def survivors(
    base: Gaussian, restriction: Restriction, kept: Mapping[str, Tensor], params: Mapping[str, Tensor]
) -> Params:
    """T(w): where kept weights go when the others are set to zero; leading dimensions are separate points."""
    moved = restriction.solve(base.precision_product({name: params[name] * ~kept[name] for name in kept}))
    return {name: (params[name].to(moved[name]) + moved[name]) * kept[name] for name in kept}
