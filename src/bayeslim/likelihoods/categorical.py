"""Classes: p(y | f) = softmax(f)_y."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslim.errors import BayeslimWarning, ShapeMismatch
from bayeslim.io.registry import register
from bayeslim.likelihoods.base import Likelihood, moments_over_draws, per_example, single
from bayeslim.results import Prediction


@register("likelihood")
class Categorical(Likelihood):
    """One of C classes; outputs are logits.

    Args:
        class_dim: the dimension of the outputs that holds the classes: −1 for (B, ..., C), 1 for images (B, C, H, W).
            Predicted probabilities have them last, (B, H, W, C), either way.
        ignore_index: targets with this value (padding) contribute nothing.
    """

    name = "categorical"

    def __init__(self, class_dim: int = -1, ignore_index: int = -100):
        super().__init__()
        for name, value in (("class_dim", class_dim), ("ignore_index", ignore_index)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number. Got {value!r}.")
        if class_dim == 0:
            raise ValueError("class_dim must not be 0, the dimension of the examples.")
        self.class_dim = class_dim
        self.ignore_index = ignore_index

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, for saving."""
        return {"class_dim": self.class_dim, "ignore_index": self.ignore_index}

    def _logits(self, outputs: Tensor, class_dim: int | None = None) -> Tensor:
        outputs = single(outputs)
        return outputs if self.class_dim == -1 else outputs.movedim(class_dim or self.class_dim, -1)

    @property
    def _stacked_class_dim(self) -> int:
        """The dimension of the classes in outputs with draws or columns in front."""
        return self.class_dim + 1 if self.class_dim >= 0 else self.class_dim

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute log softmax(f)_y, summed over positions, (B,)."""
        losses = self._cross_entropy(outputs, targets, "none")
        return -losses if targets.ndim == 1 else -per_example(losses.view(targets.shape))

    def mean_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Average −log softmax(f)_y, summed over positions, over the examples."""
        return self._cross_entropy(outputs, targets, "sum")

    def _cross_entropy(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Compute −log softmax(f)_y of all positions, or their sum over the batch size."""
        logits = self._logits(outputs)
        if targets.is_floating_point():
            raise ShapeMismatch(
                f"Categorical needs integer class indices as targets. Got {targets.dtype}. "
                "Pass targets.long(), or targets.argmax(-1) for one-hot rows."
            )
        if logits.shape[:-1] != targets.shape:
            raise ShapeMismatch(
                f"Categorical needs targets of shape {tuple(logits.shape[:-1])} for outputs of shape "
                f"{tuple(outputs.shape)} with the classes in dimension {self.class_dim}. "
                f"Got targets of shape {tuple(targets.shape)}. "
                "Pass targets.argmax(-1) for one-hot rows, targets.squeeze(-1) for a column, or "
                "Categorical(class_dim=...) if the classes are elsewhere."
            )
        share = None
        if reduction == "sum":  # class weights of 1 / B make the sum a mean and save a division, forward and backward
            classes, examples = logits.shape[-1], max(targets.shape[0], 1)
            share = torch.full((classes,), 1 / examples, dtype=logits.dtype, device=logits.device)
        if targets.ndim > 1:
            logits, targets = logits.flatten(0, -2), targets.flatten()
        try:
            return F.cross_entropy(logits, targets.long(), share, ignore_index=self.ignore_index, reduction=reduction)
        except IndexError:
            raise ShapeMismatch(
                f"Categorical needs targets from 0 to {logits.shape[-1] - 1}, as the network has {logits.shape[-1]} "
                f"outputs. Got {int(targets.min())} to {int(targets.max())}. Give the network as many outputs as there "
                "are classes (for one output there is likelihoods.Bernoulli()), or count classes from 0."
            ) from None

    def check_outputs(self, outputs: Tensor) -> None:
        """Warn of probabilities in the place of logits."""
        logits = self._logits(outputs)
        if bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-3).all()):
            warnings.warn(
                "The outputs of the network are not negative and sum to one, as probabilities do. Categorical takes "
                "logits: leave out the softmax at the end of the network.",
                BayeslimWarning,
                stacklevel=2,
            )

    def predict(self, outputs: Tensor) -> Prediction:
        """Average the class probabilities over draws, (S, B, ..., C)."""
        probs = self._logits(outputs, self._stacked_class_dim).softmax(-1)
        mean, spread = moments_over_draws(probs)
        aleatoric = torch.special.entr(probs).sum(-1).mean(0)
        epistemic = (torch.special.entr(mean).sum(-1) - aleatoric).clamp_min(0)
        return Prediction("classes", mean, outputs, aleatoric, epistemic, probs=mean, spread=spread)

    def sqrt_hessian(self, outputs: Tensor) -> Tensor:
        """Compute columns with Σ_c s_c s_cᵀ = diag(p) − p pᵀ, (C − 1, *outputs.shape).

        Each column sets a class against those after it. With t_c = Σ_{k>c} p_k they are
        s_c = √(p_c t_c / (p_c + t_c)) (e_c − p_{>c} / t_c), the Cholesky factor, whose last column is zero.
        """
        probs = self._logits(outputs).softmax(-1)
        first, after = probs[..., :-1], probs[..., 1:].flip(-1).cumsum(-1).flip(-1)
        weight = (first * after / (first + after)).nan_to_num_(0.0).sqrt()
        rest = (probs.unsqueeze(-2) / after.unsqueeze(-1)).nan_to_num_(0.0).triu(1)
        columns = weight.unsqueeze(-1) * (torch.eye(*rest.shape[-2:]).to(rest) - rest)
        columns = columns.movedim(-2, 0)  # (..., c, C) -> (c, ..., C)
        return columns.movedim(-1, self._stacked_class_dim).to(outputs.dtype)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw classes."""
        probs = self._logits(outputs).softmax(-1)
        draws = torch.multinomial(probs.reshape(-1, probs.shape[-1]), 1, generator=generator)
        return draws.view(probs.shape[:-1])
