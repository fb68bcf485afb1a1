"""Independent Gaussians, the mean field: q(w) = Π N(wᵢ | μᵢ, σᵢ²)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayeslim.families.base import Density, Draw, Family, add_parameter, kept_of, precise_dtype
from bayeslim.io.registry import register
from bayeslim.noise import standard_normals_like
from bayeslim.posteriors import Diagonal
from bayeslim.sites import owner, tensor_at
from bayeslim.types import Params

MAX_INITIAL_STD = 0.03
"""The initial σ of matrices with a small fan-in. Noise that is much larger grows before the means have learned."""

MAX_INITIAL_NOISE = 0.3
"""The largest initial noise of a unit's pre-activation, relative to the root mean square of its inputs."""

INITIAL_STD_OF_VECTORS = 0.01
"""The initial σ of parameters without a fan-in: biases, and the scales of norms."""


@register("family")
@dataclass(frozen=True)
class DiagonalGaussian(Family):
    """Independent Gaussians, wᵢ ~ N(μᵢ, σᵢ²), trained in μ and log σ.

    Attributes:
        initial_std: the initial σ of every weight. By default it is 0.03, or 0.3 / √(fan-in) in layers of more than 100
            inputs, so that a unit's noise is at most 0.3 of the size of its inputs, and at most the standard deviation
            of a normal prior. Vectors, which have no fan-in, start at 0.01.
    """

    initial_std: float | None = None
    name: ClassVar[str] = "diagonal"
    suffix: ClassVar[str] = "_log_std"
    suffixes: ClassVar[tuple[str, ...]] = ("_log_std",)
    counts_otherwise: ClassVar[bool] = False
    """Whether `counted` differs from the trained mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_std is not None and not self.initial_std > 0:
            raise ValueError(f"initial_std is a standard deviation and must be positive. Got {self.initial_std}.")

    def register(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Add log σ to every parameter's module."""
        for name in names:
            mean = model.get_parameter(name)
            std = _std_by_fan_in(mean) if self.initial_std is None else self.initial_std
            start = torch.full_like(mean, math.log(std), dtype=precise_dtype(mean))
            add_parameter(model, name + self.suffix, start)

    def log_std_of(self, module: nn.Module, leaf: str) -> Tensor | None:
        """Return the log σ of a module's parameter; None if that is not random."""
        log_std: Tensor | None = getattr(module, leaf + self.suffix, None)
        return log_std

    def counted(self, mean: Tensor, log_std: Tensor) -> Tensor:
        """Return the mean that training and the posterior use: here μ itself."""
        return mean

    def log_std(self, model: nn.Module, name: str) -> Tensor:
        """Return the log σ of a random parameter."""
        log_std = self.log_std_of(*owner(model, name))
        assert log_std is not None, name
        return log_std

    def mean(self, model: nn.Module, name: str) -> Tensor:
        """Return the mean that training and the posterior use."""
        return self.counted(tensor_at(model, name), self.log_std(model, name))

    def std(self, model: nn.Module, name: str) -> Tensor:
        """Compute σ of a parameter, differentiable."""
        return self.log_std(model, name).exp()

    def density(self, model: nn.Module, names: tuple[str, ...], masks: Mapping[str, Tensor]) -> IndependentWeights:
        """Build q at the present parameters, differentiable."""
        log_stds = {name: self.log_std(model, name) for name in names}
        means = {name: self.mean(model, name).to(log_stds[name].dtype) for name in names}
        return IndependentWeights(means, log_stds, masks)

    def posterior(self, model: nn.Module, names: tuple[str, ...]) -> Diagonal:
        """Build the posterior at the present parameters, as data."""
        with torch.no_grad():
            return Diagonal(
                {name: self.mean(model, name).detach().clone() for name in names},
                {name: self.std(model, name) for name in names},
            )


def _std_by_fan_in(weight: Tensor) -> float:
    if weight.ndim < 2 or not weight.numel():
        return INITIAL_STD_OF_VECTORS
    return min(MAX_INITIAL_STD, MAX_INITIAL_NOISE / math.sqrt(weight[0].numel()))


class IndependentWeights(Density):
    """Independent weights; log q(w) = Σ −½ ε² − log σ − ½ log 2π of the draw's noise."""

    def __init__(self, means: Params, log_stds: Params, masks: Mapping[str, Tensor]):
        self.means, self.log_stds, self.masks = means, log_stds, masks
        self.stds = {name: log_std.exp() for name, log_std in log_stds.items()}
        self.log_weights = next(iter(log_stds.values())).new_zeros(1)

    def noise(self) -> Params:
        """Draw ε for every weight."""
        return standard_normals_like(self.stds, self.stds)

    def draw(self, noise: Params, component: int | Tensor = 0) -> Draw:
        """Compute w = μ + σ ε."""
        weights = {name: torch.addcmul(mean, self.stds[name], noise[name]) for name, mean in self.means.items()}
        return Draw(weights, noise)

    def log_prob(self, draw: Draw) -> Tensor:
        """Compute log q(w)."""
        values = []
        for name, log_std in self.log_stds.items():
            each = -0.5 * draw.noise[name].square() - log_std - 0.5 * math.log(2 * math.pi)
            values.append((each[kept_of(self.masks, name, each)] if name in self.masks else each).sum())
        return torch.stack(values).sum()
