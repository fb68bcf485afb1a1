"""A Gaussian given that some of its weights are zero: N(m, P_RR⁻¹) over the kept weights R.

It keeps its base, since a conditioned Kronecker posterior is no longer Kronecker. Samples follow Matheron's rule: a
sample of the base, moved to where the precision wants its kept weights once the others are zero, is an exact sample of
the conditional (Wilson et al. 2021, arXiv:2011.04026).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bayeslim.errors import CorruptFile
from bayeslim.io.registry import register, registered
from bayeslim.posteriors.base import check_masks
from bayeslim.posteriors.conjugate import DEFAULT_SOLVER, Solver
from bayeslim.posteriors.gaussian import Gaussian, How, Restriction, survivors
from bayeslim.posteriors.prior_precision import PriorPrecision
from bayeslim.types import Params


@register("posterior")
class Conditioned(Gaussian):
    """A Gaussian posterior conditioned on zeros; made by `Gaussian.condition`.

    Args:
        base: the posterior before the cut.
        masks: by name, True = kept; parameters without a mask are kept whole.
        mean: the conditional mean, zero where cut.
        solver: how far solves with P_RR go, where they are iterative.
    """

    kind: ClassVar[str] = "conditioned"

    def __init__(
        self, base: Gaussian, masks: Mapping[str, Tensor], mean: Mapping[str, Tensor], solver: Solver = DEFAULT_SOLVER
    ):
        self.base = base
        self.masks = check_masks(masks, base.mean)
        self._mean = {name: mean[name] * self.masks[name] for name in base.mean}
        self.solver = solver

    @cached_property
    def restriction(self) -> Restriction:
        """P_RR."""
        return self.base.restrict(self.masks, self.solver)

    @property
    def mean(self) -> Params:
        """The conditional mean, zero where cut."""
        return self._mean

    @cached_property
    def variance(self) -> Params:
        """The diagonal of P_RR⁻¹, zero where cut.

        Exact, but for a Kronecker layer that keeps more weights than are factored at once (`kept.EXACT`): there it is
        each row's own variance times what correlations between rows added before the cut.
        """
        return self.restriction.variance()

    @property
    def support(self) -> Params:
        """Which weights are random: those kept, and random in the base."""
        return {name: random & self.masks[name] for name, random in self.base.support.items()}

    def precision_product(self, params: Mapping[str, Tensor]) -> Params:
        """P_RR v_R."""
        return self._cut(self.base.precision_product(self._cut(params)))

    def covariance_product(self, params: Mapping[str, Tensor]) -> Params:
        """P_RR⁻¹ v_R."""
        return self.restriction.solve(params)

    def log_det_precision(self) -> Tensor:
        """log|P_RR|; for a large Kronecker layer a stochastic estimate, the same at every call."""
        return self.restriction.log_det()

    def noise(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Matheron's rule on a draw of the base."""
        return survivors(self.base, self.restriction, self.masks, self.base.noise(n, generator=generator))

    def restrict(self, kept: Mapping[str, Tensor], solver: Solver) -> Restriction:
        """P of the weights kept both times."""
        return self.base.restrict({name: kept[name] & mask for name, mask in self.masks.items()}, solver)

    def condition(
        self,
        masks: Mapping[str, Tensor],
        how: How = "joint",
        *,
        tolerance: float = Solver.tolerance,
        max_iterations: int = Solver.max_iterations,
    ) -> Conditioned:
        """Cut more: the base conditioned once on all zeros."""
        kept = check_masks(masks, self._mean)
        both = {name: mask & kept[name] for name, mask in self.masks.items()}
        return self.base.condition(both, how, tolerance=tolerance, max_iterations=max_iterations)

    def with_prior_precision(self, prior_precision: PriorPrecision) -> Conditioned:
        """The same zeros under another prior precision; the mean stays."""
        return Conditioned(self.base.with_prior_precision(prior_precision), self.masks, self._mean, self.solver)

    def config(self) -> dict[str, Any]:
        """The base's kind and configuration, and the solver."""
        return {"base": self.base.kind, "base_config": self.base.config(), "solver": asdict(self.solver)}

    def tensors(self) -> Params:
        """Means, masks, and all of the base's."""
        tensors = {f"mean:{name}": t for name, t in self._mean.items()}
        tensors |= {f"mask:{name}": t for name, t in self.masks.items()}
        return {k: t.detach().contiguous() for k, t in tensors.items()} | {
            f"base/{name}": t for name, t in self.base.tensors().items()
        }

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Build it again from `config()` and `tensors()`."""
        base_class = registered("posterior", config["base"])
        if not issubclass(base_class, Gaussian):
            raise CorruptFile(f'A conditioned posterior needs a Gaussian base. Got "{config["base"]}".')
        inner = {n.removeprefix("base/"): t for n, t in tensors.items() if n.startswith("base/")}
        return cls(
            base_class.restore(config["base_config"], inner),
            {n.removeprefix("mask:"): t for n, t in tensors.items() if n.startswith("mask:")},
            {n.removeprefix("mean:"): t for n, t in tensors.items() if n.startswith("mean:")},
            Solver(**config["solver"]),
        )

    def _cut(self, params: Mapping[str, Tensor]) -> Params:
        return {name: params[name] * mask for name, mask in self.masks.items()}
