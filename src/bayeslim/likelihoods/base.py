"""The base of all likelihoods, and the shapes that they share."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayeslim.errors import ShapeMismatch
from bayeslim.results import Prediction


class Likelihood(nn.Module):
    """The base of all likelihoods."""

    name: ClassVar[str]

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute log p(yₙ | fₙ) of each example, (B,)."""
        raise NotImplementedError

    def mean_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Average −log p(yₙ | fₙ) over the examples."""
        return -self.log_prob(outputs, targets).mean()

    def check_targets(self, targets: Tensor) -> None:
        """Raise a `ShapeMismatch` for impossible targets; `fit` checks the first batch."""

    def check_outputs(self, outputs: Tensor) -> None:
        """Warn of outputs that would be misread; `Laplace` checks the first batch."""

    def predict(self, outputs: Tensor) -> Prediction:
        """Summarise draws of the outputs, (S, B, ...), as a `Prediction`."""
        raise NotImplementedError

    def sqrt_hessian(self, outputs: Tensor) -> Tensor:
        """Compute columns s_k, (K, *outputs.shape), with Σ_k s_k s_kᵀ = −∇²_f log p(y|f).

        The generalised Gauss-Newton matrix is made of them. The Hessian is block-diagonal over all but the last
        dimension, and each column holds a column of every block.
        """
        raise NotImplementedError

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets from p(y | f)."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, for saving."""
        return {}

    def extra_repr(self) -> str:
        """Show the arguments in the repr."""
        return ", ".join(f"{k}={v!r}" for k, v in self.config().items())


def per_example(values: Tensor) -> Tensor:
    """Sum over all dimensions but the first, that of the examples."""
    return values.flatten(1).sum(1) if values.ndim > 1 else values


def single(outputs: Tensor) -> Tensor:
    """Convert half precision to float32, which log-probabilities and averages need."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def aligned(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Give outputs and targets one shape.

    Either may lack a trailing dimension of one; any other difference is an error.
    """
    if outputs.shape != targets.shape:
        if outputs.shape == (*targets.shape, 1):
            targets = targets.unsqueeze(-1)
        elif targets.shape == (*outputs.shape, 1):
            outputs = outputs.unsqueeze(-1)
        else:
            raise ShapeMismatch(
                f"{type(likelihood).__name__} needs targets of the outputs' shape {tuple(outputs.shape)}. "
                f"Got {tuple(targets.shape)}."
            )
    return outputs, targets


def check_range(likelihood: Likelihood, targets: Tensor, least: float, most: float) -> None:
    """Raise a `ShapeMismatch` unless all targets lie in [least, most]."""
    if targets.numel() and not (least <= float(targets.min()) and float(targets.max()) <= most):
        name = type(likelihood).__name__
        raise ShapeMismatch(
            f"{name} needs targets {f'from {least} to {most}' if most < math.inf else f'of at least {least}'}. "
            f"Got {float(targets.min()):g} to {float(targets.max()):g}."
        )


def diagonal_columns(scale: Tensor) -> Tensor:
    """Make the columns of a diagonal over the last dimension, (K, *scale.shape)."""
    if scale.ndim == 1:
        return scale.unsqueeze(0)
    return torch.diag_embed(scale).movedim(-2, 0)


def binary_entropy(probs: Tensor) -> Tensor:
    """Compute −p log p − (1 − p) log(1 − p)."""
    entropy: Tensor = torch.special.entr(probs) + torch.special.entr(1 - probs)
    return entropy


def moments_over_draws(values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and variance over the first dimension, in fast contiguous passes."""
    mean = values.mean(0)
    return mean, (values - mean).square().mean(0)
