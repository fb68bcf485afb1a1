"""Counts: p(y | f) = exp(y f − eᶠ) / y!."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeslim.io.registry import register
from bayeslim.likelihoods.base import (
    Likelihood,
    aligned,
    check_range,
    diagonal_columns,
    moments_over_draws,
    per_example,
    single,
)
from bayeslim.results import Prediction


@register("likelihood")
class Poisson(Likelihood):
    """Counts; outputs are log rates, of the targets' shape."""

    name = "poisson"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute y f − eᶠ − log y!, summed over an example's targets, (B,)."""
        outputs, targets = aligned(self, single(outputs), targets)
        counts = targets.to(outputs.dtype)
        return per_example(counts * outputs - outputs.exp() - torch.lgamma(counts + 1))

    def check_targets(self, targets: Tensor) -> None:
        """Raise a `ShapeMismatch` if a count is negative."""
        check_range(self, targets, 0, math.inf)

    def predict(self, outputs: Tensor) -> Prediction:
        """Average the rates over draws, (S, B, ...); a count's own variance is its rate."""
        rate, spread = moments_over_draws(single(outputs).exp())
        return Prediction("counts", rate, outputs, aleatoric=rate.clone(), epistemic=spread)

    def sqrt_hessian(self, outputs: Tensor) -> Tensor:
        """Put √rate on each output's own axis, (K, *outputs.shape)."""
        return diagonal_columns((outputs / 2).exp())

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw counts."""
        return torch.poisson(outputs.exp(), generator=generator)
