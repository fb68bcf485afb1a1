"""Any univariate distribution of `torch.distributions` as a prior.

Its KL from a Gaussian is torch's own where torch knows it, else estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions.constraints import Constraint, is_dependent

from bayeslim.io.registry import entered, register
from bayeslim.noise import seeding_torch_from
from bayeslim.priors.base import check_broadcasts
from bayeslim.priors.learnable import Learnable
from bayeslim.priors.torch_distributions import beside, parameters_of


@register("prior")
@dataclass(frozen=True, repr=False)
class Distribution(Learnable):
    """A torch distribution over the real numbers, such as `D.Cauchy(0.0, 0.1)`.

    Attributes:
        distribution: a univariate distribution; its batch shape must broadcast to the parameter.
        samples: the number of draws that estimate the KL, where that has no closed form.
    """

    distribution: D.Distribution
    samples: int = field(default=1, kw_only=True)
    name: ClassVar[str] = "distribution"

    def __post_init__(self) -> None:
        if not isinstance(self.distribution, D.Distribution):
            raise TypeError(f"Distribution takes an object of torch.distributions. Got {self.distribution!r}.")
        if self.learn and not self._is_known:
            raise ValueError(
                f"The parameters of a {type(self.distribution).__name__} cannot be learned; those of "
                f"{', '.join(entered('distribution'))} can."
            )
        super().__post_init__()

    @property
    def _is_known(self) -> bool:
        return type(self.distribution) in entered("distribution").values()

    def hyperparameters(self) -> Mapping[str, Constraint]:
        """Return the constraints of the parameters that determine the distribution."""
        own: Any = self.distribution.arg_constraints if self._is_known else {}
        return {name: constraint for name, constraint in own.items() if not is_dependent(constraint)}

    def setting(self, name: str) -> float | Tensor:
        """Read a parameter of the distribution."""
        value: Tensor = getattr(self.distribution, name)
        return value

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Make a fixed copy with other parameters."""
        given = {**parameters_of(self.distribution), **settings}
        return super().with_settings({"distribution": type(self.distribution)(**given, validate_args=False)})

    def log_prob(self, weight: Tensor) -> Tensor:
        """Compute the distribution's own log-density."""
        return beside(self.distribution, weight).log_prob(weight)

    def kl(self, mean: Tensor, std: Tensor, log_std: Tensor | None = None) -> Tensor:
        """Compute torch's closed form if it has one; else estimate the KL by draws."""
        q = D.Normal(mean, std, validate_args=False)
        try:
            return D.kl_divergence(q, beside(self.distribution, std)).sum()
        except NotImplementedError:
            return super().kl(mean, std, log_std)

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw weights of a shape."""
        with seeding_torch_from(generator):
            draws: Tensor = self.distribution.expand(torch.Size(shape)).sample()
        return draws

    def at(self, mask: Tensor) -> Self:
        """Select the prior of the weights that a boolean mask picks."""
        if self.distribution.batch_shape and not self._is_known:
            raise NotImplementedError(
                f"A {type(self.distribution).__name__} with a batch shape cannot be the prior of a pruned parameter. "
                "Use one for all its weights."
            )
        return super().at(mask)

    def check_fits(self, name: str, parameter: Tensor) -> None:
        """Raise an error unless it is univariate, with a density at all real numbers."""
        distribution = self.distribution
        who = f'A {type(distribution).__name__} cannot be the prior of "{name}"'
        if distribution.event_shape:
            raise ValueError(f"{who}: it is multivariate. Use a univariate distribution.")
        check_broadcasts(distribution.batch_shape, parameter, f'batch shape of the prior of "{name}"')
        far = torch.tensor([-1e30, -1.0, -1e-3, 0.0, 1e-3, 1.0, 1e30])
        far = far.reshape(-1, *[1] * len(distribution.batch_shape))
        support: Any = distribution.support
        if support is None or support.is_discrete or not bool(support.check(far).all()):
            raise ValueError(
                f"{who}: a Gaussian posterior reaches every number, and it has no density outside of {support}. "
                "Use one over the real numbers."
            )
