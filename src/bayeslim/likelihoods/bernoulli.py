"""Yes or no: p(y = 1 | f) = σ(f)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslim.io.registry import register
from bayeslim.likelihoods.base import (
    Likelihood,
    aligned,
    binary_entropy,
    check_range,
    diagonal_columns,
    moments_over_draws,
    per_example,
    single,
)
from bayeslim.results import Prediction


@register("likelihood")
class Bernoulli(Likelihood):
    """Independent yes/no targets; outputs are logits, of the targets' shape."""

    name = "bernoulli"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute y log σ(f) + (1−y) log σ(−f), summed over an example's targets, (B,)."""
        outputs, targets = aligned(self, single(outputs), targets)
        return -per_example(F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none"))

    def check_targets(self, targets: Tensor) -> None:
        """Raise a `ShapeMismatch` unless all targets lie in [0, 1]."""
        check_range(self, targets, 0, 1)

    def predict(self, outputs: Tensor) -> Prediction:
        """Average the probabilities over draws, (S, B, ...)."""
        probs = single(outputs).sigmoid()
        mean, spread = moments_over_draws(probs)
        aleatoric = binary_entropy(probs).mean(0)
        epistemic = (binary_entropy(mean) - aleatoric).clamp_min(0)
        return Prediction("binary", mean, outputs, aleatoric, epistemic, probs=mean, spread=spread)

    def sqrt_hessian(self, outputs: Tensor) -> Tensor:
        """Put √(p(1−p)) on each output's own axis, (K, *outputs.shape)."""
        return diagonal_columns((outputs.sigmoid() * (-outputs).sigmoid()).sqrt())

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw zeros and ones."""
        return torch.bernoulli(outputs.sigmoid(), generator=generator)
