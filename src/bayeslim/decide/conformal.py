"""Conformal prediction: sets of classes and intervals that cover the truth with a chosen probability.

A score s(x, y) says how badly y fits the prediction of x. With the scores of n held-out examples and a new one,
exchangeable with them,

    P(s(x, y) ≤ λ) ≥ 1 − α,      λ = the ⌈(n + 1)(1 − α)⌉-th smallest score

so {y : s(x, y) ≤ λ} covers the truth with probability 1 − α at least, and at most 1 − α + 1 / (n + 1) if no scores are
equal: over the draw of the held-out data and the new example, whatever the network and however wrong its posterior.

    LAC   s = 1 − p_y                              the smallest sets on average
    APS   s = Σ_{p_c > p_y} p_c + u p_y            u ~ U(0, 1): sets that adapt to hard examples
    RAPS  APS + 0.01 max(0, rank − 5)              fewer very large sets
    absolute |y − μ|  ·  scaled |y − μ| / σ  ·  CQR max(q_low − y, y − q_high)        for values

Where an example has many outputs (pixels), its loss is the fraction that its sets do not cover, and λ is the smallest
with (Σ_i loss_i(λ) + 1) / (n + 1) ≤ α: the expected fraction uncovered is then at most α (conformal risk control). For
one output this is the quantile above. Of very many outputs a random choice stands for an example: the expected loss is
the same, and memory stays bounded.

Vovk, Gammerman & Shafer 2005 · Romano, Patterson & Candès 2019, arXiv:1905.03222 · Romano, Sesia & Candès 2020,
arXiv:2006.02544 · Angelopoulos et al. 2021, arXiv:2009.14193 · Angelopoulos et al. 2024, arXiv:2208.02814
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeslim.decide.predictors import Predictor, Predicts, need_kind, told_targets
from bayeslim.errors import BayeslimError, check_number
from bayeslim.likelihoods import Likelihood
from bayeslim.results import Prediction
from bayeslim.types import Inputs

CLASS_SCORES = ("lac", "aps", "raps")
VALUE_SCORES = ("absolute", "scaled", "cqr")
RAPS_PENALTY, RAPS_FREE_CLASSES = 0.01, 5

MAX_OUTPUTS_PER_EXAMPLE = 4096
"""The most outputs (pixels) whose scores are kept of a held-out example."""


@dataclass(frozen=True)
class ConformalSets:
    """Sets of classes.

    Attributes:
        contains: whether a class is in the set, (B, ..., C).
        prediction: the prediction they were made from.
        ignored: the class index of outputs without a target.
    """

    contains: Tensor
    prediction: Prediction
    ignored: int | None = None

    def __repr__(self) -> str:
        return f"ConformalSets: {self.sizes.numel():,} sets of {self.sizes.double().mean():.2f} classes on average"

    @property
    def sizes(self) -> Tensor:
        """The number of classes in each set, (B, ...)."""
        return self.contains.sum(-1)

    def covers(self, targets: Tensor) -> Tensor:
        """Tell which sets contain the class of their example.

        The set of an output without a target contains none.
        """
        labels, told = told_targets(self.prediction, targets.to(self.contains.device), self.ignored)
        found: Tensor = self.contains.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return found & told


@dataclass(frozen=True)
class ConformalIntervals:
    """Intervals of values.

    Attributes:
        lower: the lower ends.
        upper: the upper ends.
        prediction: the prediction they were made from.
    """

    lower: Tensor
    upper: Tensor
    prediction: Prediction

    def __repr__(self) -> str:
        return f"ConformalIntervals: {self.widths.numel():,} intervals of mean width {self.widths.mean():.4g}"

    @property
    def widths(self) -> Tensor:
        """The widths of the intervals."""
        return self.upper - self.lower

    def covers(self, targets: Tensor) -> Tensor:
        """Tell which intervals contain the value of their example."""
        targets, _ = told_targets(self.prediction, targets.to(self.lower.device), None)
        return (self.lower <= targets) & (targets <= self.upper)


@dataclass(frozen=True)
class Conformal:
    """A predictor of sets or intervals, made by `conformal`.

    Attributes:
        predicts: the predictor.
        coverage: the probability to cover the truth.
        score: the name of the score.
        threshold: λ; (C,) with one for each class.
        num_data: the number of held-out examples with a target.
    """

    predicts: Predicts
    coverage: float
    score: str
    threshold: Tensor
    num_data: int

    def __call__(self, x: Inputs, generator: torch.Generator | None = None) -> ConformalSets | ConformalIntervals:
        """Predict sets or intervals of inputs.

        Args:
            x: inputs.
            generator: of the random numbers of APS and RAPS.
        """
        prediction = self.predicts(x)
        threshold = self.threshold.to(prediction.mean.device)
        if self.score in CLASS_SCORES:
            scores = class_scores(prediction, self.score, generator)
            return ConformalSets(scores <= threshold, prediction, self.predicts.ignored)
        low, high, unit = _band(prediction, self.score, self.coverage)
        middle = (low + high) / 2  # a negative λ must not turn an interval around
        lower, upper = (low - threshold * unit).minimum(middle), (high + threshold * unit).maximum(middle)
        return ConformalIntervals(lower, upper, prediction)

    def __repr__(self) -> str:
        least = math.ceil(self.coverage / (1 - self.coverage) - 1e-9)
        few = f", too few: below {least:,}, sets and intervals hold everything" if self.num_data < least else ""
        return f"Conformal: coverage {self.coverage:g} by {self.score}, from {self.num_data:,} examples{few}"


def conformal(
    predictor: Predictor,
    loader: Iterable[Any],
    coverage: float = 0.9,
    *,
    score: str = "auto",
    per_class: bool = False,
    likelihood: Likelihood | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Conformal:
    """Make a predictor of sets or intervals that cover the truth with a probability.

    Args:
        predictor: a Bayesian network, a plain, slim or distilled one, or a function from inputs to outputs.
        loader: held-out data, which neither trained nor tuned the network.
        coverage: the probability, such as 0.9. It takes at least coverage / (1 − coverage) held-out examples, 19 for
            0.95; with fewer, every set holds every class and every interval every value.
        score: "lac", "aps" or "raps" for classes; "absolute", "scaled" (by the predictive standard deviation) or "cqr"
            (the predictive quantiles) for values. "auto" is LAC for classes and scaled for values.
        per_class: one threshold for each class, so that each class is covered with the probability; a class needs
            about 1 / (1 − coverage) examples, or it is in every set. For pixels it is the expected fraction of the
            pixels of that class, in images that have some.
        likelihood: what the outputs mean, where the predictor is not Bayesian.
        generator: of the drawn networks, and of the random numbers of APS and RAPS.
        **options: of `bayeslim.predict`, for a Bayesian network.

    >>> import bayeslim as bl
    >>> x, y = torch.zeros(99, 1), torch.arange(99.0)[:, None]
    >>> made = bl.conformal(torch.nn.Identity(), [(x, y)], 0.9, likelihood=bl.likelihoods.Gaussian(noise=1.0))
    >>> made(torch.zeros(1, 1)).upper
    tensor([[89.]], dtype=torch.float64)
    """
    check_number("coverage", coverage, above=0, below=1)
    predicts = Predicts(predictor, likelihood, options, generator)
    held_out = _HeldOut()
    for prediction, given in predicts.over(loader):
        score = _chosen(prediction, score)
        targets, told = told_targets(prediction, given, predicts.ignored)
        if score in CLASS_SCORES:
            own = class_scores(prediction, score, generator).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        else:
            low, high, unit = _band(prediction, score, coverage)
            own = torch.maximum(low - targets, targets - high) / unit
        held_out.add(own, targets, told)
    if per_class and score not in CLASS_SCORES:
        raise BayeslimError("per_class=True is for predictions of classes.")
    scores, examples, labels = held_out.gathered()
    count = len(examples.unique())
    if not count:
        raise predicts.no_target
    if not per_class:
        return Conformal(predicts, coverage, score, _of_examples(scores, examples, 1 - coverage), count)
    found = [
        _of_examples(scores[labels == c], examples[labels == c], 1 - coverage) for c in range(class_count(prediction))
    ]
    return Conformal(predicts, coverage, score, torch.stack(found), count)


class _HeldOut:
    """The scores of held-out outputs, with the example and the label of each, on the CPU."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self.count = 0
        self.generator = torch.Generator().manual_seed(0)

    def add(self, scores: Tensor, labels: Tensor, told: Tensor) -> None:
        """Add the scores of a batch, (B, ...)."""
        rows = [part.reshape(len(scores), -1).cpu() for part in (scores.double(), labels, told)]
        if rows[0].shape[1] > MAX_OUTPUTS_PER_EXAMPLE:
            keys = torch.rand(rows[0].shape, generator=self.generator) - 1.0 * ~rows[2]  # outputs without target last
            chosen = keys.topk(MAX_OUTPUTS_PER_EXAMPLE, dim=1).indices
            rows = [part.gather(1, chosen) for part in rows]
        own, label, is_told = rows
        example = torch.arange(self.count, self.count + len(own))[:, None].expand_as(own)
        self.parts.append((own[is_told], example[is_told], label[is_told]))
        self.count += len(own)

    def gathered(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, examples and labels of all outputs."""
        scores, examples, labels = (torch.cat(part) for part in zip(*self.parts, strict=True))
        return scores, examples, labels


def _of_examples(scores: Tensor, examples: Tensor, alpha: float) -> Tensor:
    """Find the threshold of outputs; the outputs of an example weigh one together."""
    _, place, sizes = examples.unique(return_inverse=True, return_counts=True)
    return _threshold(scores, 1 / sizes[place].double(), alpha, len(sizes))


def class_count(prediction: Prediction) -> int:
    """Count the classes of a prediction."""
    assert prediction.probs is not None
    return prediction.probs.shape[-1]


def class_scores(prediction: Prediction, score: str, generator: torch.Generator | None) -> Tensor:
    """Compute the score of every class, (B, ..., C)."""
    probs = prediction.probs
    assert probs is not None
    if score == "lac":
        return 1 - probs.double()
    probs = probs.double()
    order = probs.argsort(-1, descending=True)
    ranked = probs.gather(-1, order)
    u = torch.rand(probs.shape[:-1], dtype=torch.float64, generator=generator).to(probs.device).unsqueeze(-1)
    above = ranked.cumsum(-1) - ranked + u * ranked
    if score == "raps":
        ranks = torch.arange(1, probs.shape[-1] + 1, device=probs.device)
        above = above + RAPS_PENALTY * (ranks - RAPS_FREE_CLASSES).clamp_min(0)
    return torch.empty_like(above).scatter(-1, order, above)


def _chosen(prediction: Prediction, score: str) -> str:
    need_kind(prediction, ("classes", "values"), "conformal")
    known = CLASS_SCORES if prediction.kind == "classes" else VALUE_SCORES
    if score == "auto":
        return "lac" if prediction.kind == "classes" else "scaled"
    if score not in known:
        raise ValueError(f"score of {prediction.kind} is one of {', '.join(known)}. Got {score!r}.")
    return score


def _band(prediction: Prediction, score: str, coverage: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the interval at λ = 0, and the unit by which λ widens it."""
    mean = prediction.mean.double()
    if score == "cqr":
        low, high = prediction.interval(coverage)
        return low.double(), high.double(), torch.ones_like(mean)
    unit = prediction.std.double().clamp_min(1e-300) if score == "scaled" else torch.ones_like(mean)
    return mean, mean, unit


def _threshold(scores: Tensor, weights: Tensor, alpha: float, count: int) -> Tensor:
    """Find the smallest λ with an uncovered weight of at most α (n + 1) − 1."""
    allowed = alpha * (count + 1) - 1 + 1e-9 * count  # rounding must not cost a whole example
    if allowed < 0:
        return torch.tensor(math.inf, dtype=torch.float64, device=scores.device)
    ordered, order = scores.sort()
    above = weights.sum() - weights[order].cumsum(0)  # the weight of the scores above each one
    first = int((above <= allowed).nonzero()[0])
    return ordered[first]
