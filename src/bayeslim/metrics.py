"""Metrics of predictions: accuracy and calibration.

For class probabilities p and the true class y, averaged over examples:

    error = 1[argmax p ≠ y]      nll = −log p_y      brier = Σ_c (p_c − 1[c = y])²
    ece   = Σ_b (n_b / n) |accuracy_b − confidence_b|          over bins b of the confidence max p

(Guo et al., "On calibration of modern neural networks", 2017). For real targets with a Gaussian predictive N(m, v):

    rmse = √ mean (y − m)²       nll = ½ log 2πv + (y − m)² / 2v

Each is a function of a whole set of predictions; `Classification` and `Regression` reach the same numbers batch by
batch, in constant memory. Errors are fractions, logarithms natural.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeslim.errors import ShapeMismatch, check_whole

BINS = 15


@dataclass(frozen=True, eq=False)
class Calibration:
    """The reliability curve: the accuracy of predictions by confidence.

    Empty bins have zeros.

    Attributes:
        edges: the bins (edge_b, edge_b+1] of the confidence, (B + 1,).
        count: predictions in each bin, (B,).
        confidence: their mean confidence, (B,).
        accuracy: the fraction of them that is right, (B,).
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    def __post_init__(self) -> None:
        bins = len(self.count)
        lengths = {name: value.shape for name, value in vars(self).items()}
        if lengths != dict.fromkeys(lengths, (bins,)) | {"edges": (bins + 1,)}:
            shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in lengths.items())
            raise ShapeMismatch(f"A reliability curve of B bins has B + 1 edges and columns of length B. Got {shapes}.")

    @property
    def ece(self) -> float:
        """The expected calibration error: the mean gap between accuracy and confidence."""
        weight = self.count / self.count.sum()
        return float((weight * (self.accuracy - self.confidence).abs()).sum())

    @property
    def mce(self) -> float:
        """The largest gap of any bin."""
        return float((self.accuracy - self.confidence).abs().max())

    def __repr__(self) -> str:
        return f"Calibration: ece {self.ece:.4f}, mce {self.mce:.4f} over {int((self.count > 0).sum())} filled bins"


@dataclass(frozen=True)
class ClassificationScores:
    """Means over `count` examples, and the reliability curve behind `ece`."""

    count: int
    error: float
    nll: float
    brier: float
    calibration: Calibration

    @property
    def ece(self) -> float:
        """The expected calibration error."""
        return self.calibration.ece

    def __repr__(self) -> str:
        return (
            f"error {100 * self.error:.2f} %, nll {self.nll:.4f}, brier {self.brier:.4f}, ece {self.ece:.4f} "
            f"({self.count:,} examples)"
        )


@dataclass(frozen=True)
class RegressionScores:
    """Means over `count` targets."""

    count: int
    rmse: float
    nll: float

    def __repr__(self) -> str:
        return f"rmse {self.rmse:.4f}, nll {self.nll:.4f} ({self.count:,} targets)"


def error(probs: Tensor, targets: Tensor) -> float:
    """Compute the fraction of examples whose most probable class is not the target.

    Args:
        probs: class probabilities, (..., C).
        targets: class indices, (...).
    """
    probs, targets = _classes(probs, targets)
    return float((probs.argmax(-1) != targets).double().mean())


def nll(probs: Tensor, targets: Tensor) -> float:
    """Compute the mean of −log p_y; arguments as `error`.

    A probability that underflowed to 0 counts as the smallest positive number of its dtype.
    """
    return float(_nll(*_classes(probs, targets)).mean())


def brier(probs: Tensor, targets: Tensor) -> float:
    """Compute the squared distance to one-hot targets, 0 to 2; arguments as `error`."""
    return float(_brier(*_classes(probs, targets)).mean())


def calibration(probs: Tensor, targets: Tensor, bins: int = BINS, adaptive: bool = False) -> Calibration:
    """Compute the reliability curve.

    Args:
        probs: class probabilities, (..., C).
        targets: class indices, (...).
        bins: the number of bins.
        adaptive: bins with equally many predictions instead of bins of equal width. Equal confidences are never torn
            apart, so heavily tied ones make fewer, larger bins.
    """
    probs, targets = _classes(probs, targets)
    confidence, correct = _confidence(probs, targets)
    edges = _equal_mass_edges(confidence, bins) if adaptive else _equal_width_edges(bins)
    return _curve(edges, _bin_sums(confidence, correct, edges))


def expected_calibration_error(probs: Tensor, targets: Tensor, bins: int = BINS, adaptive: bool = False) -> float:
    """Compute the mean gap of accuracy and confidence; arguments as `calibration`."""
    return calibration(probs, targets, bins, adaptive).ece


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Compute how well a score separates two sets of inputs.

    It is P(score outside > score inside) + ½ P(equal): 1 is perfect, ½ is chance.

    Args:
        inside: scores of inputs like the training data, any shape; an entropy, for instance.
        outside: scores of other inputs, which should be higher.
    """
    inside, outside = _two_sides("auroc", inside, outside)
    inside = inside.sort().values
    below = torch.searchsorted(inside, outside, right=False)
    not_above = torch.searchsorted(inside, outside, right=True)
    return int((below + not_above).sum()) / (2 * len(inside) * len(outside))


def aupr(inside: Tensor, outside: Tensor) -> float:
    """Compute the average precision of an alarm for outside inputs.

    It is the mean over outside inputs of the fraction of alarms at their score or above that are outside. The arguments
    are those of `auroc`.
    """
    inside, outside = _two_sides("aupr", inside, outside)
    low, high = inside.sort().values, outside.sort().values
    false_alarms = len(low) - torch.searchsorted(low, high, right=False)
    alarms = len(high) - torch.searchsorted(high, high, right=False)
    return float((alarms / (alarms + false_alarms)).double().mean())


def fpr_at_95(inside: Tensor, outside: Tensor) -> float:
    """Compute the share of inside alarms at 95 % of outside ones; as in `auroc`."""
    inside, outside = _two_sides("fpr_at_95", inside, outside)
    threshold = outside.sort().values[len(outside) - math.ceil(0.95 * len(outside))]
    return float((inside >= threshold).double().mean())


def rmse(mean: Tensor, targets: Tensor) -> float:
    """Compute the root of the mean squared error.

    Args:
        mean: predicted means, of the targets' shape.
        targets: the true values.
    """
    return math.sqrt(float(_squares(mean, targets).mean()))


def gaussian_nll(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """Compute the mean of −log N(y | m, v).

    Args:
        mean: predicted means, of the targets' shape.
        variance: predicted *variances*, of the targets' shape.
        targets: the true values.
    """
    return float(_gaussian_nll(mean, variance, targets).mean())


class Classification:
    """Scores of class probabilities, batch by batch.

    >>> scores = Classification()
    >>> scores.update(torch.tensor([[0.8, 0.2], [0.6, 0.4]]), torch.tensor([0, 1]))
    >>> scores.compute()
    error 50.00 %, nll 0.5697, brier 0.4000, ece 0.4000 (2 examples)

    Args:
        bins: the number of equally wide bins of the reliability curve.
    """

    def __init__(self, bins: int = BINS):
        self._edges = _equal_width_edges(bins)
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._bins = torch.zeros(3, len(self._edges) - 1, dtype=torch.float64)

    def update(self, probs: Tensor, targets: Tensor) -> None:
        """Add a batch: probabilities (..., C) and classes, or of yes, (B, 1), and 0 or 1."""
        probs, targets = _classes(probs, targets)
        confidence, correct = _confidence(probs, targets)
        each = torch.stack([torch.ones_like(correct), 1 - correct, _nll(probs, targets), _brier(probs, targets)])
        self._sums += each.sum(1).cpu()
        self._bins += _bin_sums(confidence, correct, self._edges).cpu()

    def compute(self) -> ClassificationScores:
        """Compute the scores of all batches so far."""
        count, wrong, nll_sum, brier_sum = self._sums.tolist()
        _some(count)
        return ClassificationScores(
            int(count), wrong / count, nll_sum / count, brier_sum / count, _curve(self._edges, self._bins)
        )


class Regression:
    """Scores of Gaussian predictions, batch by batch.

    >>> scores = Regression()
    >>> scores.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 4.0]))
    >>> scores.compute()
    rmse 1.4142, nll 1.5155 (2 targets)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._count, self._squares, self._nll = 0, 0.0, 0.0

    def update(self, mean: Tensor, variance: Tensor, targets: Tensor) -> None:
        """Add a batch of predicted means and variances and of targets, all of one shape."""
        squares, nll = _squares(mean, targets), _gaussian_nll(mean, variance, targets)
        self._count += targets.numel()
        self._squares += float(squares.sum())
        self._nll += float(nll.sum())

    def compute(self) -> RegressionScores:
        """Compute the scores of all batches so far."""
        _some(self._count)
        return RegressionScores(self._count, math.sqrt(self._squares / self._count), self._nll / self._count)


def _some(count: float) -> None:
    if not count:
        raise ShapeMismatch("Scores need at least one example. Call update(...) first.")


def _classes(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Check and flatten probabilities and targets to (N, C) and (N,)."""
    _tensors(probs, targets)
    if probs.ndim > 1 and probs.shape[-1] == 1 and probs.numel() == targets.numel():  # of yes
        probs, targets = torch.cat([1 - probs, probs], -1).flatten(0, -2), targets.flatten()
        targets = targets.long() if bool((targets == targets.round()).all()) else targets
    elif probs.shape[:-1] == (*targets.shape, 1):
        targets = targets.unsqueeze(-1)
    if probs.shape[:-1] != targets.shape or probs.ndim < 2:
        raise ShapeMismatch(
            f"Class probabilities (..., C) need targets (...). Got {tuple(probs.shape)} and {tuple(targets.shape)}. "
            "For yes/no targets pass torch.stack([1 - p, p], -1)."
        )
    if targets.is_floating_point():
        raise ShapeMismatch(f"Targets must be class indices. Got {targets.dtype}. Pass targets.long() or argmax(-1).")
    probs, targets = probs.detach().flatten(0, -2), targets.detach().flatten().long()
    if not len(targets):
        raise ShapeMismatch("Scores need at least one example. Got an empty batch.")
    if targets.min() < 0 or targets.max() >= probs.shape[1]:
        raise ValueError(
            f"Targets must be in 0 ... {probs.shape[1] - 1}. Got {int(targets.min())} to {int(targets.max())}. "
            "Leave out examples that have no class."
        )
    if not (probs.min() >= 0 and (probs.double().sum(-1) - 1).abs().max() < 0.01):
        raise ValueError("Probabilities must be non-negative and sum to 1. Got other values; pass logits.softmax(-1).")
    return (probs.float() if probs.dtype in (torch.float16, torch.bfloat16) else probs), targets


def _nll(probs: Tensor, targets: Tensor) -> Tensor:
    chosen = probs.gather(1, targets.unsqueeze(1)).squeeze(1)
    return -chosen.clamp_min(torch.finfo(probs.dtype).tiny).double().log()


def _brier(probs: Tensor, targets: Tensor) -> Tensor:
    chosen = probs.gather(1, targets.unsqueeze(1)).squeeze(1).double()
    return probs.double().square().sum(-1) - 2 * chosen + 1


def _confidence(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    confidence, guess = probs.max(-1)
    return confidence, (guess == targets).double()


def _equal_width_edges(bins: int) -> Tensor:
    check_whole("bins", bins)
    return torch.arange(bins + 1, dtype=torch.float64) / bins


def _equal_mass_edges(confidence: Tensor, bins: int) -> Tensor:
    """Compute edges at the quantiles, so that bins hold equally many, but for ties."""
    fractions = _equal_width_edges(bins)[1:-1]
    ordered = confidence.sort().values
    last = (fractions * len(ordered)).ceil().long().sub(1).clamp_min(0)
    inner = ordered[last.to(ordered.device)].unique()
    return torch.cat([inner.new_zeros(1), inner[inner < ordered[-1]], inner.new_ones(1)])


def _bin_sums(confidence: Tensor, correct: Tensor, edges: Tensor) -> Tensor:
    """Sum count, confidence and correct predictions of each bin, (3, B)."""
    # edges of the confidences' own type, so that a confidence of 0.2 is equal to an edge at 0.2
    which = torch.bucketize(confidence, edges[1:-1].to(confidence))
    values = torch.stack([torch.ones_like(correct), confidence.double(), correct])
    return values.new_zeros(3, len(edges) - 1).index_add_(1, which, values)


def _curve(edges: Tensor, sums: Tensor) -> Calibration:
    sums = sums.cpu()
    count = sums[0]
    filled = count.clamp_min(1)
    return Calibration(edges.double().cpu(), count.long(), sums[1] / filled, sums[2] / filled)


def _tensors(*values: Any) -> None:
    for value in values:
        if not isinstance(value, Tensor):
            raise TypeError(f"Metrics need tensors. Got {type(value).__name__}. Use torch.as_tensor(...).")


def _two_sides(name: str, inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    _tensors(inside, outside)
    inside, outside = inside.flatten(), outside.flatten()
    if not len(inside) or not len(outside):
        raise ShapeMismatch(f"{name} needs scores on both sides. Got {len(inside)} inside and {len(outside)} outside.")
    if inside.isnan().any() or outside.isnan().any():
        raise ValueError(f"{name} needs scores that can be ordered. Got NaN.")
    return inside, outside


def _squares(mean: Tensor, targets: Tensor) -> Tensor:
    _tensors(mean, targets)
    if mean.shape != targets.shape:
        raise ShapeMismatch(
            f"Predicted means and targets need one shape. Got {tuple(mean.shape)} and {tuple(targets.shape)}."
        )
    if not targets.numel():
        raise ShapeMismatch("Scores need at least one example. Got an empty batch.")
    _check_finite("Predicted means", mean)
    _check_finite("Targets", targets)
    return (mean.detach().double() - targets.detach().double()).square()


def _check_finite(what: str, values: Tensor) -> None:
    wrong = int((~values.isfinite()).sum())
    if wrong:
        raise ValueError(
            f"{what} must be finite numbers. Got NaN or infinity in {wrong} of {values.numel()}. Leave such examples "
            "out, or look for the batch in which the network or the data went wrong."
        )


def _gaussian_nll(mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    _tensors(variance)
    squares = _squares(mean, targets)
    if variance.shape != targets.shape:
        raise ShapeMismatch(
            f"Predicted variances and targets need one shape. Got {tuple(variance.shape)} and {tuple(targets.shape)}."
        )
    variance = variance.detach().double()
    _check_finite("Predicted variances", variance)
    if not (variance > 0).all():
        raise ValueError(f"Predicted variances must be positive. Got {variance.min().item():.4g}.")
    return 0.5 * (2 * math.pi * variance).log() + squares / (2 * variance)
