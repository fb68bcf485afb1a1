"""Independent Gaussians: q(w) = Π N(wᵢ | μᵢ, σᵢ²).

Conditioning on zeros leaves the survivors where they are, since nothing is correlated. A standard deviation of zero is
a point mass: a parameter that is known, or cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bayeslim.io.registry import register
from bayeslim.noise import standard_normals_like
from bayeslim.posteriors.base import Posterior, check_masks, keyed, unkeyed
from bayeslim.types import Params


@register("posterior")
class Diagonal(Posterior):
    """A fully factorised Gaussian.

    Args:
        mean: μ by name.
        std: σ by name, of the same shapes; zero is a point mass.
    """

    kind: ClassVar[str] = "diagonal"

    def __init__(self, mean: Mapping[str, Tensor], std: Mapping[str, Tensor]):
        self._mean = dict(mean)
        self._std = {name: std[name].expand(value.shape) for name, value in self._mean.items()}

    @property
    def mean(self) -> Params:
        """μ by name."""
        return self._mean

    @property
    def std(self) -> Params:
        """σ by name."""
        return self._std

    @property
    def variance(self) -> Params:
        """σ² by name."""
        return {name: std.square() for name, std in self._std.items()}

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Draw w = μ + σ ε."""
        lead = () if n is None else (n,)
        like = {name: std.expand((*lead, *std.shape)) for name, std in self._std.items()}
        noise = standard_normals_like(like, like, generator=generator)
        # In place, since on a CPU the allocation of a result takes as long as the sum.
        return {n: noise[n].mul_(self._std[n]).add_(mean).to(mean.dtype) for n, mean in self._mean.items()}

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """Sum log N(wᵢ | μᵢ, σᵢ²); a point mass counts as 0 at its point, −∞ elsewhere."""
        total = torch.zeros((), dtype=torch.float64)
        for name, mean in self._mean.items():
            std = self._std[name]
            point = std == 0
            safe = torch.where(point, torch.ones_like(std), std)
            off = params[name].to(std.dtype) - mean
            density = -0.5 * (off / safe).square() - safe.log() - 0.5 * math.log(2 * math.pi)
            at_point = torch.where(off == 0, torch.zeros_like(density), torch.full_like(density, -torch.inf))
            total = total + torch.where(point, at_point, density).double().sum().cpu()
        return total

    def condition(self, masks: Mapping[str, Tensor]) -> Self:
        """Set mean and spread to zero where a mask is False; the rest stays."""
        kept = check_masks(masks, self._mean)
        return type(self)(
            {name: mean * kept[name] for name, mean in self._mean.items()},
            {name: std * kept[name] for name, std in self._std.items()},
        )

    def tensors(self) -> Params:
        """Collect `mean:name` and `std:name`."""
        return keyed(mean=self._mean, std=self._std)

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Build it again from `tensors()`."""
        return cls(unkeyed(tensors, "mean"), unkeyed(tensors, "std"))
