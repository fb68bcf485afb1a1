"""A mixture of networks with independent Gaussian weights: q(w) = Σ_c π_c Π N(wᵢ | μ_ci, σ_ci²).

One component is drawn for all weights together, so weights are dependent although each component's are not. Given that
the weights S are zero, a component keeps its other weights where they were, and its weight is multiplied by its density
at those zeros:

    π_c' ∝ π_c Π_{i∈S} N(0 | μ_ci, σ_ci²).

A standard deviation of zero is a point mass: a parameter that is known, or cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bayeslim.errors import ShapeMismatch
from bayeslim.io.registry import register
from bayeslim.noise import standard_normals_like
from bayeslim.posteriors.base import Posterior, check_masks, keyed, unkeyed
from bayeslim.posteriors.diagonal import Diagonal
from bayeslim.types import Params


@register("posterior")
class Mixture(Posterior):
    """A mixture of fully factorised Gaussians.

    Args:
        log_weights: log π, (C,); normalised here.
        means: μ by name, (C, *shape).
        stds: σ by name, of the same shapes; zero is a point mass.
    """

    kind: ClassVar[str] = "mixture"

    def __init__(self, log_weights: Tensor, means: Mapping[str, Tensor], stds: Mapping[str, Tensor]):
        if log_weights.ndim != 1 or not len(log_weights):
            raise ShapeMismatch(f"A mixture has one weight a component, (C,). Got {tuple(log_weights.shape)}.")
        for name, mean in means.items():
            if mean.shape[:1] != log_weights.shape or stds[name].shape != mean.shape:
                raise ShapeMismatch(
                    f'"{name}" needs a mean and a spread for each of {len(log_weights)} components, in front of its '
                    f"own shape. Got {tuple(mean.shape)} and {tuple(stds[name].shape)}."
                )
        self.log_weights = log_weights.double().log_softmax(0)
        self.means = dict(means)
        self.stds = {name: stds[name] for name in self.means}

    @property
    def weights(self) -> Tensor:
        """π, (C,)."""
        return self.log_weights.exp()

    @property
    def components(self) -> list[Diagonal]:
        """Every component as a posterior of its own."""
        return [
            Diagonal({n: mean[c] for n, mean in self.means.items()}, {n: std[c] for n, std in self.stds.items()})
            for c in range(len(self.log_weights))
        ]

    @property
    def mean(self) -> Params:
        """Σ_c π_c μ_c, which lies between the modes and may be far from all of them."""
        return {name: self._mixed(mean).to(mean.dtype) for name, mean in self.means.items()}

    @property
    def variance(self) -> Params:
        """Σ_c π_c (σ_c² + (μ_c − E w)²)."""
        return {name: variance.to(self.stds[name].dtype) for name, variance in self._variances().items()}

    @property
    def mode(self) -> Params:
        """The centre of the component with the highest density there."""
        best = max(self.components, key=lambda component: float(self.log_prob(component.mean)))
        return best.mean

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Draw a component, then w = μ_c + σ_c ε."""
        count = 1 if n is None else n
        device = None if generator is None else generator.device
        chosen = torch.multinomial(self.weights.to(device), count, replacement=True, generator=generator)
        chosen = chosen.to(self.log_weights.device)
        if n is None:
            chosen = chosen[0]
        spread = {name: std[chosen] for name, std in self.stds.items()}
        noise = standard_normals_like(spread, spread, generator=generator)
        return {
            name: torch.addcmul(mean[chosen], spread[name], noise[name]).to(mean.dtype)
            for name, mean in self.means.items()
        }

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """Compute log Σ_c π_c q_c(w); a point mass is 0 at its point, −∞ elsewhere."""
        each = torch.stack([component.log_prob(params) for component in self.components])
        return (self.log_weights.to(each) + each).logsumexp(0)

    def condition(self, masks: Mapping[str, Tensor]) -> Mixture:
        """Condition every component, and weight it by its density at the zeros."""
        kept = check_masks(masks, {name: mean[0] for name, mean in self.means.items()})
        cut = [
            Diagonal({n: part.mean[n][~kept[n]] for n in kept}, {n: part.std[n][~kept[n]] for n in kept})
            for part in self.components
        ]
        zeros = {name: value.new_zeros(int((~kept[name]).sum())) for name, value in self.mean.items()}
        log_weights = self.log_weights + torch.stack([part.log_prob(zeros) for part in cut]).to(self.log_weights)
        if not bool(log_weights.isfinite().any()):
            log_weights = self.log_weights  # all densities underflow to zero, so that the weights stay
        return Mixture(
            log_weights,
            {name: mean * kept[name] for name, mean in self.means.items()},
            {name: std * kept[name] for name, std in self.stds.items()},
        )

    def tensors(self) -> Params:
        """Collect `log_weights`, `mean:name` and `std:name`."""
        return keyed(mean=self.means, std=self.stds) | {"log_weights": self.log_weights}

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Build it again from `tensors()`."""
        return cls(tensors["log_weights"], unkeyed(tensors, "mean"), unkeyed(tensors, "std"))

    def _mixed(self, values: Tensor) -> Tensor:
        weights = self.weights.to(values.device).view(-1, *[1] * (values.ndim - 1))
        return (weights * values.double()).sum(0)

    def _variances(self) -> Params:
        found = {}
        for name, mean in self.means.items():
            off = mean.double() - self._mixed(mean)
            found[name] = self._mixed(self.stds[name].double().square() + off.square())
        return found

    def __repr__(self) -> str:
        shares = ", ".join(f"{share:.3g}" for share in self.weights.tolist())
        return f"{super().__repr__()}: {len(self.weights)} components with weights {shares}"
