"""Variational families: the distributions q(w) that `Variational` fits.

A family keeps its own trainable parameters beside the user's: for the parameter `fc.weight`, whose own tensor holds the
mean, the module `fc` also gets `weight_rho`. So they move, train, shard and save with the layer they belong to, and the
user's names stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeslim.errors import UnsupportedModel
from bayeslim.select import owner


@dataclass(frozen=True)
class DiagonalGaussian:
    """Independent Gaussians, wᵢ ~ N(μᵢ, σᵢ²) with σ = log(1 + e^ρ).

    Attributes:
        initial_std: σ at the start, for every weight.
    """

    initial_std: float = 0.01
    name: ClassVar[str] = "diagonal"
    suffix: ClassVar[str] = "_rho"

    def __post_init__(self) -> None:
        if not self.initial_std > 0:
            raise ValueError(f"initial_std is a standard deviation and must be positive. Got {self.initial_std}.")

    def register(self, model: nn.Module, name: str) -> None:
        """Give a parameter its ρ."""
        module, leaf = owner(model, name)
        mean = model.get_parameter(name)
        # Half-precision cannot hold σ² of a small σ, so ρ stays in single precision there.
        dtype = torch.float32 if mean.dtype in (torch.float16, torch.bfloat16) else mean.dtype
        rho = math.log(math.expm1(self.initial_std))
        module.register_parameter(
            leaf + self.suffix, nn.Parameter(torch.full_like(mean, rho, dtype=dtype, requires_grad=True))
        )

    def check(self, model: nn.Module, name: str) -> None:
        """Refuse a model that already has a parameter or attribute where ρ would go."""
        module, leaf = owner(model, name)
        if hasattr(module, leaf + self.suffix):
            raise UnsupportedModel(
                f'"{name}{self.suffix}" already exists in the model: it is Bayesian already, or uses that name. '
                "Start from the plain network (bnn.mean_network())."
            )

    def std(self, model: nn.Module, name: str) -> Tensor:
        """σ of a parameter, differentiable."""
        return F.softplus(model.get_parameter(name + self.suffix))


FAMILIES: dict[str, type[DiagonalGaussian]] = {c.name: c for c in (DiagonalGaussian,)}
"""Families by the name they are saved under; a new one is added here."""
