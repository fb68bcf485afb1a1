"""Correlated Gaussians N(μ, P⁻¹) over named parameters, and the same given that some weights are zero.

Each family is known by products with its precision P. With R the kept weights and S the cut ones, a point w moves to

    T(w)_R = w_R + P_RR⁻¹ P_RS w_S,        T(w)_S = 0.

T(μ) is the conditional mean, and T of a sample is a sample of the conditional N(T(μ)_R, P_RR⁻¹) (Matheron's rule:
Wilson et al. 2021, arXiv:2011.04026). A family only has to solve with P_RR: its `restrict`. A conditioned posterior
keeps its base, since a conditioned Kronecker posterior is no longer Kronecker.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from bayeslim.errors import CorruptFile, ShapeMismatch
from bayeslim.io.registry import register, registered
from bayeslim.posteriors.base import Posterior, check_masks, keyed, like_means, unkeyed
from bayeslim.posteriors.conjugate import DEFAULT_SOLVER, Solve, Solver
from bayeslim.posteriors.prior_precision import PriorPrecision
from bayeslim.types import Params, flattened

How = Literal["joint", "row"]


class Restriction(ABC):
    """P_RR, the precision of the kept weights; all values are by name and zero where cut."""

    @abstractmethod
    def solve(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P_RR⁻¹ v_R; leading dimensions are separate right-hand sides."""

    @abstractmethod
    def log_det(self) -> Tensor:
        """Compute log|P_RR|."""

    @abstractmethod
    def variance(self) -> Params:
        """Compute the diagonal of P_RR⁻¹."""


class Gaussian(Posterior):
    """A Gaussian with precision P. Products take one parameter setting, or several stacked in front."""

    _mean: Params

    @property
    def mean(self) -> Params:
        """μ by name."""
        return self._mean

    @abstractmethod
    def precision_product(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P v."""

    @abstractmethod
    def covariance_product(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P⁻¹ v."""

    @abstractmethod
    def log_det_precision(self) -> Tensor:
        """Compute log|P| over the random weights, differentiable in the prior precision."""

    @abstractmethod
    def noise(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Draw once, or `n` times stacked in front, from N(0, P⁻¹)."""

    @abstractmethod
    def restrict(self, kept: Mapping[str, Tensor], solver: Solver) -> Restriction:
        """Restrict P to the kept weights, a mask of every parameter, True = kept."""

    @abstractmethod
    def with_prior_precision(self, prior_precision: PriorPrecision) -> Self:
        """Keep the curvature and the mean, and take another prior precision."""

    @property
    def support(self) -> Params:
        """Masks of the random weights by name; the others are point masses at the mean."""
        return {name: torch.ones_like(value, dtype=torch.bool) for name, value in self.mean.items()}

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Draw μ + P^(-1/2) ε, in the mean's dtype."""
        noise = self.noise(n, generator=generator)
        return {name: (value + noise[name]).to(value.dtype) for name, value in self.mean.items()}

    def quadratic(self, params: Mapping[str, Tensor]) -> Tensor:
        """Compute (w − μ)ᵀ P (w − μ), a scalar."""
        off = {name: params[name].double() - value.double() for name, value in self.mean.items()}
        image = self.precision_product(off)
        total = torch.zeros((), dtype=torch.float64)
        for name, value in off.items():
            total = total + (value * image[name]).sum().cpu()
        return total

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """Compute ½ log|P| − ½ (w − μ)ᵀ P (w − μ) − n/2 log 2π; −∞ away from a point mass."""
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
        """Compute J P⁻¹ Jᵀ, (B, C, C), of Jacobians (B, C, *shape) by name.

        Returns:
            (B, C, C).
        """
        flat = {name: value.flatten(0, 1) for name, value in jacobian.items()}
        image = self.covariance_product(flat)
        covariance: Tensor | float = 0.0
        for name, value in jacobian.items():
            left = flattened(value, 2).to(image[name])
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
        """Condition on w = 0 wherever a mask is False; survivors move.

        Args:
            masks: by name, True = kept; parameters without a mask are kept whole.
            how: "joint" solves for all survivors of a layer together, the definition. "row" (Kronecker only) solves
                each output's row on the input factor alone: faster at high sparsity, exact only if the output factor
                is diagonal. It decides where the mean goes; the covariance is that of P_RR either way.
            tolerance: relative error at which conjugate gradients stop (Kronecker only).
            max_iterations: most iterations of conjugate gradients. Where they do not suffice, a small layer is solved
                directly; a large one gets the better of the last iterate and the row-wise mean, with a warning.
        """
        if how not in ("joint", "row"):
            raise ValueError(f'how must be "joint" or "row". Got {how!r}.')
        kept = check_masks(masks, self.mean)
        solver = Solver(tolerance, max_iterations)
        mean, solves = (self.rowwise_mean(kept), {}) if how == "row" else self.conditional_mean(kept, solver)
        own = {name: value.to(self.mean[name].dtype) for name, value in mean.items()}
        return Conditioned(self, kept, own, solver, solves)

    def conditional_mean(self, kept: Mapping[str, Tensor], solver: Solver) -> tuple[Params, dict[str, Solve]]:
        """Compute T(μ), and tell how each layer was solved for if that took iterations."""
        return survivors(self, self.restrict(kept, solver), kept, self.mean), {}

    def rowwise_mean(self, kept: Mapping[str, Tensor]) -> Params:
        """Compute the conditional mean row by row; families without rows raise."""
        raise ValueError(
            f'how="row" needs a Kronecker posterior. {type(self).__name__} is solved exactly by how="joint".'
        )


def survivors(
    base: Gaussian, restriction: Restriction, kept: Mapping[str, Tensor], params: Mapping[str, Tensor]
) -> Params:
    """Compute T(w) of points w; leading dimensions are separate points."""
    moved = restriction.solve(base.precision_product({name: params[name] * ~kept[name] for name in kept}))
    return {name: (params[name].to(moved[name]) + moved[name]) * kept[name] for name in kept}


@register("posterior")
class Conditioned(Gaussian):
    """A Gaussian posterior conditioned on zeros; made by `Gaussian.condition`.

    Args:
        base: the posterior before the cut.
        masks: by name, True = kept; parameters without a mask are kept whole.
        mean: the conditional mean, zero where cut.
        solver: when iterative solves with P_RR stop.
        solves: how the mean of each layer was solved for, by the weight's name; not saved.
    """

    kind: ClassVar[str] = "conditioned"

    def __init__(
        self,
        base: Gaussian,
        masks: Mapping[str, Tensor],
        mean: Mapping[str, Tensor],
        solver: Solver = DEFAULT_SOLVER,
        solves: Mapping[str, Solve] | None = None,
    ):
        self.base = base
        self.masks = check_masks(masks, base.mean)
        self._mean = {name: mean[name] * self.masks[name] for name in base.mean}
        self.solver = solver
        self.solves = dict(solves or {})

    @cached_property
    def restriction(self) -> Restriction:
        """P_RR."""
        return self.base.restrict(self.masks, self.solver)

    @cached_property
    def variance(self) -> Params:
        """The diagonal of P_RR⁻¹, zero where cut.

        Exact, except for a Kronecker layer that keeps more than `kept.MAX_EXACT_WEIGHTS` weights: there it is each
        row's own variance times the factor by which correlations between rows raised it before the cut.
        """
        return like_means(self.restriction.variance(), self.base.mean)

    @property
    def support(self) -> Params:
        """Masks of the random weights: those kept, and random in the base."""
        return {name: random & self.masks[name] for name, random in self.base.support.items()}

    def precision_product(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P_RR v_R."""
        return self._cut(self.base.precision_product(self._cut(params)))

    def covariance_product(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P_RR⁻¹ v_R."""
        return self.restriction.solve(params)

    def log_det_precision(self) -> Tensor:
        """Compute log|P_RR|; for a large Kronecker layer a reproducible estimate."""
        return self.restriction.log_det()

    def noise(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Draw by Matheron's rule from a draw of the base."""
        return survivors(self.base, self.restriction, self.masks, self.base.noise(n, generator=generator))

    def restrict(self, kept: Mapping[str, Tensor], solver: Solver) -> Restriction:
        """Restrict P to the weights kept both times."""
        return self.base.restrict({name: kept[name] & mask for name, mask in self.masks.items()}, solver)

    def condition(self, masks: Mapping[str, Tensor], how: How = "joint", **solver: Any) -> Conditioned:
        """Condition the base once on the zeros of both cuts."""
        kept = check_masks(masks, self._mean)
        return self.base.condition({name: mask & kept[name] for name, mask in self.masks.items()}, how, **solver)

    def with_prior_precision(self, prior_precision: PriorPrecision) -> Conditioned:
        """Keep the zeros and the mean, and take another prior precision."""
        return Conditioned(self.base.with_prior_precision(prior_precision), self.masks, self._mean, self.solver)

    def config(self) -> dict[str, Any]:
        """Describe the base's kind and configuration, and the solver."""
        return {"base": self.base.kind, "base_config": self.base.config(), "solver": asdict(self.solver)}

    def tensors(self) -> Params:
        """Collect means, masks, and all tensors of the base."""
        base = {f"base/{name}": t for name, t in self.base.tensors().items()}
        return keyed(mean=self._mean, mask=self.masks) | base

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Build it again from `config()` and `tensors()`."""
        base_class = registered("posterior", config["base"])
        if not issubclass(base_class, Gaussian):
            raise CorruptFile(f'A conditioned posterior needs a Gaussian base. Got "{config["base"]}".')
        base = base_class.restore(config["base_config"], unkeyed(tensors, "base", "/"))
        return cls(base, unkeyed(tensors, "mask"), unkeyed(tensors, "mean"), Solver(**config["solver"]))

    def _cut(self, params: Mapping[str, Tensor]) -> Params:
        return {name: params[name] * mask for name, mask in self.masks.items()}
