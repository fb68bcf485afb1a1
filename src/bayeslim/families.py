"""Variational families: the distributions q(w) that `Variational` fits.

A family keeps its own trainable parameters beside the user's: for the parameter `fc.weight`, whose own tensor holds the
mean, the module `fc` also gets `weight_log_std`. So they move, train, shard and save with the layer they belong to, and
the user's names stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayeslim.errors import UnsupportedModel
from bayeslim.select import owner


@dataclass(frozen=True)
class DiagonalGaussian:
    """Independent Gaussians, wᵢ ~ N(μᵢ, σᵢ²), trained in μ and log σ.

    Attributes:
        initial_std: σ at the start, for every weight.
    """

    initial_std: float = 0.01
    name: ClassVar[str] = "diagonal"
    suffix: ClassVar[str] = "_log_std"

    def __post_init__(self) -> None:
        if not self.initial_std > 0:
            raise ValueError(f"initial_std is a standard deviation and must be positive. Got {self.initial_std}.")

    def register(self, model: nn.Module, name: str) -> None:
        """Give a parameter its log σ."""
        module, leaf = owner(model, name)
        mean = model.get_parameter(name)
        # Half-precision cannot hold σ² of a small σ, so log σ stays in single precision there.
        dtype = torch.float32 if mean.dtype in (torch.float16, torch.bfloat16) else mean.dtype
        start = torch.full_like(mean, math.log(self.initial_std), dtype=dtype)
        module.register_parameter(leaf + self.suffix, nn.Parameter(start))

    def check(self, model: nn.Module, name: str) -> None:
        """Refuse a model that already has a parameter or attribute where log σ would go."""
        module, leaf = owner(model, name)
        if hasattr(module, leaf + self.suffix):
            raise UnsupportedModel(
                f'"{name}{self.suffix}" already exists in the model: it is Bayesian already, or uses that name. '
                "Start from the plain network (bnn.mean_network())."
            )

    def log_std(self, model: nn.Module, name: str) -> Tensor:
        """The log σ of a parameter, as it is trained."""
        return model.get_parameter(name + self.suffix)

    def std(self, model: nn.Module, name: str) -> Tensor:
        """σ of a parameter, differentiable."""
        return self.log_std(model, name).exp()


FAMILIES: dict[str, type[DiagonalGaussian]] = {c.name: c for c in (DiagonalGaussian,)}
"""Families by the name they are saved under; a new one is added here."""
