"""Weights as points: q(w) = δ(w − μ), the most probable weights.

A point has no KL to a density; −log p(μ) takes its place, so that the loss is that of maximum a posteriori (with
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
from bayeslim.posteriors import Diagonal


@register("family")
@dataclass(frozen=True)
class Point(Family):
    """Weights without noise, to be scaled by gates.

    An example is `bl.Variational(families.Point(), gates=gates.HardConcrete())`.
    """

    name: ClassVar[str] = "point"
    suffixes: ClassVar[tuple[str, ...]] = ()

    def register(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Add nothing: a point has no parameters beside its mean."""

    def density(self, model: nn.Module, names: tuple[str, ...], masks: Mapping[str, Tensor]) -> Density:
        """Raise a `BayeslimError`: points have no density."""
        raise BayeslimError("Weights that are points have no density. Use families.DiagonalGaussian().")

    def posterior(self, model: nn.Module, names: tuple[str, ...]) -> Diagonal:
        """Build point masses at the present weights."""
        mean = {name: model.get_parameter(name).detach().clone() for name in names}
        return Diagonal(mean, {name: torch.zeros_like(value) for name, value in mean.items()})
