"""Weights as points: q(w) = δ(w − μ), the most probable weights.

A point has no KL to a density; what stands for it is −log p(μ), so that the loss is that of maximum a posteriori (with
`priors.Normal`, weight decay). It is for networks whose randomness is in their gates: structured Bayesian pruning, L0,
the information bottleneck and dropout all scale plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayeslim.errors import BayeslimError
from bayeslim.families.base import Density, Family
from bayeslim.io.registry import register
from bayeslim.posteriors import Diagonal, Posterior


@register("family")
@dataclass(frozen=True)
class Point(Family):
    """Weights without noise, to be scaled by gates: `bl.Variational(families.Point(), gates=gates.HardConcrete())`."""

    name: ClassVar[str] = "point"
    suffixes: ClassVar[tuple[str, ...]] = ()

    def register(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Nothing stands beside a point."""

    def density(self, model: nn.Module, names: tuple[str, ...], masks: Mapping[str, Tensor]) -> Density:
        """There is none."""
        raise BayeslimError("Weights that are points have no density. Use families.DiagonalGaussian().")

    def posterior(self, model: nn.Module, names: tuple[str, ...]) -> Diagonal:
        """Point masses at the weights as they are now."""
        mean = {name: model.get_parameter(name).detach().clone() for name in names}
        return Diagonal(mean, {name: torch.zeros_like(value) for name, value in mean.items()})

    def assign(self, model: nn.Module, posterior: Posterior, masks: Mapping[str, Tensor]) -> None:
        """Zeros where a mask is False."""
        with torch.no_grad():
            for name, value in posterior.mean.items():
                model.get_parameter(name).copy_(value)
