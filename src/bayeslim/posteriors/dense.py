"""The full Gaussian N(μ, P⁻¹) over some or all weights of the named parameters.

With `indices` it is a subnetwork: those weights are random with a full precision, the others of the same parameters are
point masses at the mean (Daxberger et al. 2021, arXiv:2010.14689; the precision is the subnetwork's own block). All
solves are by Cholesky; conditioning is exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bayeslim.errors import BayeslimWarning, ShapeMismatch
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
class Dense(Gaussian):
    """A Gaussian with a full precision.

    Args:
        mean: μ by name.
        precision: (n, n) over the random weights, parameter by parameter in the mean's order.
        prior_precision: δ, added to the diagonal; zero if `precision` has it already.
        indices: flat indices of the random weights by name; None makes all of them random.

    Attributes:
        precision: P in float64.
        jitter: the amount added to the diagonal to factor it, relative to itself; zero unless a warning said so.
    """

    kind: ClassVar[str] = "dense"

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        precision: Tensor,
        prior_precision: PriorPrecision = 0.0,
        *,
        indices: Mapping[str, Tensor] | None = None,
    ):
        self._mean = dict(mean)
        self.curvature = precision if precision.dtype == torch.float64 else precision.float()
        self.prior_precision = prior_precision
        self.layout = FlatLayout.of(self._mean)
        self.indices = _all_indices(self._mean) if indices is None else dict(indices)
        self.places = _places(self._mean, self.indices).to(precision.device)
        if self.curvature.shape != (len(self.places), len(self.places)):
            raise ShapeMismatch(
                f"The precision must be ({len(self.places)}, {len(self.places)}), one row for each random weight. "
                f"Got {tuple(precision.shape)}."
            )
        resolved = priors.resolve(prior_precision, self._mean)
        wide = self.curvature.double()
        delta = self.layout.vector(priors.diagonal(resolved, self._mean, wide), wide)
        self.precision = (wide + wide.mT) / 2 + torch.diag_embed(delta[self.places])
        self.factor, self.jitter = cholesky(self.precision)
        if self.jitter:
            warnings.warn(
                f"A precision was singular to rounding: its diagonal was raised by {self.jitter:g} of itself. "
                "A larger prior precision avoids this.",
                BayeslimWarning,
                stacklevel=2,
            )

    @cached_property
    def covariance(self) -> Tensor:
        """P⁻¹ over the random weights, (n, n)."""
        return torch.cholesky_inverse(self.factor)

    @property
    def variance(self) -> Params:
        """The diagonal of P⁻¹, zero at point masses."""
        return like_means(self.scatter(self.covariance.diagonal()), self._mean)

    @property
    def support(self) -> Params:
        """Masks of the random weights."""
        return self.scatter(torch.ones_like(self.places, dtype=torch.bool))

    def precision_product(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P v over the random weights, zero elsewhere."""
        return self.scatter(self.gather(params) @ self.precision)

    def covariance_product(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P⁻¹ v over the random weights, zero elsewhere."""
        return self.scatter(torch.cholesky_solve(self.gather(params)[..., None], self.factor)[..., 0])

    def log_det_precision(self) -> Tensor:
        """Compute log|P|."""
        return 2 * self.factor.diagonal().double().log().sum().cpu()

    def noise(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Draw L⁻ᵀ ε, with P = L Lᵀ."""
        draw = self.factor.new_empty((len(self.places), 1 if n is None else n)).normal_(generator=generator)
        draw = torch.linalg.solve_triangular(self.factor.mT, draw, upper=True).mT
        return self.scatter(draw[0] if n is None else draw)

    def restrict(self, kept: Mapping[str, Tensor], solver: Solver) -> KeptWeights:
        """Restrict P to the kept weights."""
        return KeptWeights(self, self.layout.vector(kept, self.places).bool()[self.places])

    def with_prior_precision(self, prior_precision: PriorPrecision) -> Dense:
        """Keep the curvature, and take another prior precision."""
        return Dense(self._mean, self.curvature, prior_precision, indices=self.indices)

    def gather(self, params: Mapping[str, Tensor]) -> Tensor:
        """Gather the random weights into a vector, (..., n)."""
        return self.layout.vector(params, self.precision)[..., self.places]

    def scatter(self, vector: Tensor) -> Params:
        """Scatter a vector over the random weights into parameters, zero elsewhere."""
        whole = vector.new_zeros((*vector.shape[:-1], self.layout.size))
        return self.layout.params(whole.index_copy(-1, self.places, vector))

    def tensors(self) -> Params:
        """Collect means, indices, curvature and prior precision."""
        own = keyed(mean=self._mean, indices=self.indices) | {"precision": self.curvature.detach().contiguous()}
        return own | priors.to_tensors(self.prior_precision)

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Build it again from `tensors()`."""
        return cls(
            unkeyed(tensors, "mean"),
            tensors["precision"],
            priors.from_tensors(tensors),
            indices=unkeyed(tensors, "indices"),
        )


class KeptWeights(Restriction):
    """P_RR of a dense posterior, factored."""

    def __init__(self, base: Dense, kept: Tensor):
        self.base = base
        self.places = kept.nonzero()[:, 0]
        self.factor, _ = cholesky(base.precision[self.places][:, self.places])

    def solve(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P_RR⁻¹ v_R."""
        target = self.base.gather(params)[..., self.places, None]
        return self._scatter(torch.cholesky_solve(target, self.factor)[..., 0])

    def log_det(self) -> Tensor:
        """Compute log|P_RR|."""
        return 2 * self.factor.diagonal().double().log().sum().cpu()

    def variance(self) -> Params:
        """Compute the diagonal of P_RR⁻¹."""
        return self._scatter(torch.cholesky_inverse(self.factor).diagonal())

    def _scatter(self, vector: Tensor) -> Params:
        whole = vector.new_zeros((*vector.shape[:-1], len(self.base.places)))
        return self.base.scatter(whole.index_copy(-1, self.places, vector))


def _all_indices(mean: Mapping[str, Tensor]) -> Params:
    return {name: torch.arange(value.numel()) for name, value in mean.items()}


def _places(mean: Mapping[str, Tensor], indices: Mapping[str, Tensor]) -> Tensor:
    """Find the indices of the random weights in the vector of all parameters."""
    for name, index in indices.items():
        if name not in mean:
            raise ShapeMismatch(f'The indices of "{name}" belong to no parameter. Parameters: {", ".join(mean)}.')
        size = mean[name].numel()
        if (
            index.ndim != 1
            or index.dtype != torch.int64
            or (len(index) and not 0 <= int(index.min()) <= int(index.max()) < size)
        ):
            raise ShapeMismatch(
                f'The indices of "{name}" must be integers (int64) in one dimension, from 0 to {size - 1}. '
                f"Got {index.dtype} of shape {tuple(index.shape)}."
            )
        if len(index.unique()) != len(index):
            raise ShapeMismatch(f'The indices of "{name}" must be distinct.')
    offset, places = 0, []
    for name, value in mean.items():
        if name in indices:
            places.append(indices[name].cpu() + offset)
        offset += value.numel()
    return torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)
