"""Result objects: what the verbs return, with a repr a person can read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Prediction:
    """A predictive distribution, summarised.

    For classes and binary targets uncertainties are entropies in nats: `entropy` is the total, `aleatoric` the expected
    entropy of one network, `epistemic` their difference (the mutual information between target and weights). For values
    and counts they are variances, with `variance = aleatoric + epistemic`, and `entropy` is that of a Gaussian.

    Attributes:
        kind: the kind of targets: "classes", "binary", "values" or "counts".
        mean: the predictive mean, (B, ...): probabilities, means or rates.
        samples: the raw network outputs of every draw, (S, B, ...).
        aleatoric: the part of the uncertainty that more training data would not remove, (B, ...).
        epistemic: the part that more training data would remove, (B, ...).
        probs: class probabilities, (B, ..., C), or None for values and counts.
        spread: the variance of the probabilities across networks, or None for values and counts.
    """

    kind: Literal["classes", "binary", "values", "counts"]
    mean: Tensor
    samples: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    probs: Tensor | None = None
    spread: Tensor | None = None

    @property
    def variance(self) -> Tensor:
        """The variance of values and counts; of classes, that of the probabilities across networks."""
        return self.aleatoric + self.epistemic if self.spread is None else self.spread

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty in nats, (B, ...)."""
        if self.probs is None:
            return torch.xlogy(0.5, 2 * math.pi * math.e * self.variance)
        entropies: Tensor = torch.special.entr(self.probs)
        return entropies.sum(-1) if self.kind == "classes" else entropies + torch.special.entr(1 - self.probs)

    @property
    def classes(self) -> Tensor:
        """The most probable class of each example, (B, ...)."""
        if self.probs is None:
            raise AttributeError(f"A prediction of {self.kind} has no classes. Read .mean and .variance.")
        return (self.probs > 0.5).long() if self.kind == "binary" else self.probs.argmax(-1)

    def to(self, device: torch.device | str) -> Prediction:
        """Move every tensor to another device."""
        moved: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def __len__(self) -> int:
        return self.mean.shape[0]

    def __repr__(self) -> str:
        unit = "nats" if self.probs is not None else "variance"
        return (
            f"Prediction of {self.kind}: {len(self)} examples from {self.samples.shape[0]} samples; mean {unit}: "
            f"aleatoric {self.aleatoric.mean().item():.4g}, epistemic {self.epistemic.mean().item():.4g}"
        )


@dataclass(frozen=True)
class Evidence:
    """An estimate of log p(D), in nats.

    Attributes:
        value: the estimate.
        kind: how it was made: "elbo", "importance-weighted", "renyi 0.5", "laplace", ...
        is_bound: whether its expectation is a lower bound of log p(D).
        std_error: the Monte-Carlo standard error of `value`; 0 when it was computed exactly.
        num_data: how many examples it is the evidence of.
    """

    value: float
    kind: str
    is_bound: bool
    std_error: float = 0.0
    num_data: int = 0

    def __repr__(self) -> str:
        sign = "≥" if self.is_bound else "≈"
        spread = f" ± {self.std_error:.2g}" if self.std_error else ""
        each = f", {self.value / self.num_data:.4g} per example" if self.num_data else ""
        return f"Evidence: log p(D) {sign} {self.value:.6g}{spread} nats ({self.kind}{each})"


@dataclass
class Fit:
    """What a run of `fit` did.

    Attributes:
        history: one dict an epoch, with the data term `nll`, the `kl`, the `loss`, and validation metrics.
        best_epoch: the epoch (from 1) with the best validation metric, if there was validation.
        stopped: why it ended: "epochs", "early stopping" or a callback's words.
        seconds: wall-clock time of this run.
        resumed_from: the epoch a checkpoint was resumed at, or 0.
    """

    history: list[dict[str, float]] = field(default_factory=list)
    best_epoch: int | None = None
    stopped: str = "epochs"
    seconds: float = 0.0
    resumed_from: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        if not self.history:
            return f"Fit: no training{f', measured in {self.seconds:.1f} s' if self.seconds else ''}"
        last = ", ".join(f"{k} {v:.4g}" for k, v in self.history[-1].items() if k != "epoch")
        best = f"; best epoch {self.best_epoch}" if self.best_epoch else ""
        return f"Fit: {len(self.history)} epochs in {self.seconds:.1f} s ({self.stopped}){best}; last: {last}"
