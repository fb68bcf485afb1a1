"""Result objects of the verbs, with a readable repr."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bayeslim.errors import MissingExtra, check_number

_BISECTIONS = 60


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
        is_gaussian: whether the predictive distribution of values is N(mean, variance) itself, and not the mixture of
            the draws' Gaussians; `quantile` and `interval` read it.
    """

    kind: Literal["classes", "binary", "values", "counts"]
    mean: Tensor
    samples: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    probs: Tensor | None = None
    spread: Tensor | None = None
    is_gaussian: bool = False

    @property
    def variance(self) -> Tensor:
        """The variance of values and counts; of classes, that of probabilities."""
        return self.aleatoric + self.epistemic if self.spread is None else self.spread

    @property
    def std(self) -> Tensor:
        """The square root of `variance`."""
        return self.variance.sqrt()

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """Compute quantiles of the targets, values or counts, (B, ...).

        The predictive distribution is that of a target, noise included, not that of the mean. For values it is the
        Gaussian N(mean, variance) of one network, or where the outputs are Gaussian (`is_gaussian`: the linearised
        Laplace posterior), and otherwise the mixture over the draws of N(output, noise²), whose quantiles are found by
        bisection. For counts it is the mixture over the draws of Poisson distributions; the quantile is the smallest
        count that is exceeded with a probability of at most 1 − q.

        Args:
            q: a probability between 0 and 1, or several, whose quantiles are stacked in front.
        """
        if self.probs is not None:
            raise TypeError(
                f"A prediction of {self.kind} has no quantiles: classes have no order. Read .probs, or take quantiles "
                "of the probabilities across networks, prediction.samples.softmax(-1)."
            )
        given: Any = q
        if isinstance(given, (list, tuple, np.ndarray, Tensor)) and len(given):
            return torch.stack([self.quantile(float(one)) for one in given])
        check_number("q", given, above=0, below=1)
        return self._quantile(given)

    def _quantile(self, q: float) -> Tensor:
        if self.kind == "counts":
            return _poisson_quantile(q, self.samples.double().exp()).to(self.mean.dtype)
        if self.is_gaussian or len(self.samples) == 1:
            return self.mean + self.std * _normal_quantile(q)
        return _mixture_quantile(q, *self._components()).to(self.mean.dtype)

    def interval(self, mass: float = 0.9) -> tuple[Tensor, Tensor]:
        """Compute the central interval that holds a target with a given probability.

        Args:
            mass: the probability, such as 0.9: the bounds are the quantiles at 0.05 and 0.95.

        Returns:
            the lower and the upper bound, each (B, ...).
        """
        check_number("mass", mass, above=0, below=1)
        return self.quantile((1 - mass) / 2), self.quantile((1 + mass) / 2)

    def _components(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of every draw's Gaussian, (S, B, ...)."""
        outputs = self.samples.double()
        if outputs.shape[1:] == self.mean.shape:
            return outputs, self.aleatoric.double().sqrt().expand_as(outputs)
        means, log_variances = outputs.chunk(2, -1)  # heteroscedastic
        return means, (log_variances / 2).exp()

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copy all results to NumPy arrays by name."""
        names = ["mean", "std", "aleatoric", "epistemic", "entropy", "samples"]
        names += ["probs"] if self.probs is not None else []
        return {name: as_array(getattr(self, name)) for name in names}

    def to_pandas(self, mass: float = 0.9) -> Any:
        """Make a table with one row for every target.

        Values and counts have the columns mean, std, aleatoric, epistemic, lower and upper; classes have class,
        prob_0, prob_1, ..., entropy, aleatoric and epistemic. Several targets of an example are rows of their own.

        Args:
            mass: the probability of the interval from lower to upper.

        Returns:
            a `pandas.DataFrame`, indexed by example (and by the further dimensions of the targets).

        Raises:
            MissingExtra: if pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingExtra("pandas", "pandas", "Prediction.to_pandas") from error
        columns: dict[str, Tensor] = {}
        if self.probs is None:
            columns = {name: getattr(self, name) for name in ("mean", "std", "aleatoric", "epistemic")}
            columns["lower"], columns["upper"] = self.interval(mass)
        else:
            columns["class"] = self.classes
            shares = self.probs.unbind(-1) if self.kind == "classes" else (1 - self.probs, self.probs)
            columns |= {f"prob_{number}": share for number, share in enumerate(shares)}
            columns |= {name: getattr(self, name) for name in ("entropy", "aleatoric", "epistemic")}
        shape = tuple(self.aleatoric.shape)
        if len(shape) == 2 and shape[1] == 1:
            shape = shape[:1]
        names = ["example", *(f"dimension_{number}" for number in range(1, len(shape)))]
        index = pandas.MultiIndex.from_product([range(size) for size in shape], names=names)
        index = index if len(shape) > 1 else index.get_level_values(0)
        return pandas.DataFrame({name: as_array(value).reshape(-1) for name, value in columns.items()}, index=index)

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


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Copy a tensor to NumPy, which has no bfloat16."""
    tensor = tensor.detach().cpu()
    found: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
    return found


def _normal_quantile(q: float) -> float:
    return float(torch.special.ndtri(torch.tensor(q, dtype=torch.float64)))


def _mixture_quantile(q: float, means: Tensor, stds: Tensor) -> Tensor:
    """Find y with mean_s Φ((y − m_s) / σ_s) = q by bisection."""
    each = means + stds * _normal_quantile(q)
    low, high = each.amin(0), each.amax(0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_below = torch.special.ndtr((middle - means) / stds).mean(0) < q
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return (low + high) / 2


def _poisson_quantile(q: float, rates: Tensor) -> Tensor:
    """Find the smallest k with mean_s P(count ≤ k | rate_s) ≥ q."""

    def reached(count: Tensor) -> Tensor:
        at_most: Tensor = torch.special.gammaincc((count + 1).expand_as(rates), rates).mean(0)
        return at_most >= q

    low, high = torch.full_like(rates[0], -1.0), rates.amax(0).ceil() + 1
    while not bool(reached(high).all()):
        high = 2 * high
    while bool((high - low > 1).any()):
        middle = ((low + high) / 2).floor()
        fits = reached(middle)
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high


@dataclass(frozen=True)
class Evidence:
    """An estimate of log p(D), in nats.

    Attributes:
        value: the estimate.
        kind: the estimator: "elbo", "importance-weighted", "renyi 0.5", "laplace", ...
        is_bound: whether its expectation is a lower bound of log p(D).
        std_error: the Monte-Carlo standard error of `value`; 0 when it was computed exactly.
        num_data: the number of examples.
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
    """The record of a run of `fit`.

    Attributes:
        history: one dict an epoch, with the data term `nll`, the `kl`, the `loss`, and validation metrics.
        best_epoch: the epoch (from 1) with the best validation metric, if there was validation.
        stopped: the reason for its end: "epochs", "early stopping" or a callback's own.
        seconds: wall-clock time of this run.
        resumed_from: the epoch a checkpoint was resumed at, or 0.
    """

    history: list[dict[str, float]] = field(default_factory=list)
    best_epoch: int | None = None
    stopped: str = "epochs"
    seconds: float = 0.0
    resumed_from: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    def averaged_over(self, networks: int) -> Fit:
        """Divide the losses of the history by a number of networks, in place."""
        for epoch in self.history:
            epoch.update({key: epoch[key] / networks for key in ("nll", "kl", "loss")})
        return self

    def __repr__(self) -> str:
        if not self.history:
            return f"Fit: no training{f', measured in {self.seconds:.1f} s' if self.seconds else ''}"
        last = ", ".join(f"{k} {v:.4g}" for k, v in self.history[-1].items() if k != "epoch")
        best = f"; best epoch {self.best_epoch}" if self.best_epoch else ""
        return f"Fit: {len(self.history)} epochs in {self.seconds:.1f} s ({self.stopped}){best}; last: {last}"
