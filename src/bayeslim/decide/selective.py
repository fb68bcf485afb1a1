"""Selective prediction: answer where the network is sure, and say "don't know" elsewhere.

A predictor answers where its confidence exceeds a threshold θ. Its *coverage* is the fraction of examples it answers,
its *selective risk* the fraction of answers that are wrong. With `max_risk` r and `confidence` 1 − δ, θ is chosen so
that

    P(selective risk ≤ r) ≥ 1 − δ        over the draw of the held-out data.

The k most confident held-out examples are, given the (k + 1)-th confidence, independent draws from what a predictor
with that threshold answers, so the number of errors among them is binomial. The hypothesis "the risk is above r" is
tested for growing k, in an order fixed beforehand, up to the first that is not rejected (fixed-sequence testing: no
correction for many tests). Such a sequence starts at each of a few k, spread evenly, with an equal share of the level
δ, and the largest k that is rejected decides. With few examples there is one sequence with all of δ. Losses that are
not 0 or 1 (the fraction of wrong pixels of an image) are tested by the Hoeffding-Bentkus bound instead.

Geifman & El-Yaniv 2017, arXiv:1705.08500 · Angelopoulos et al. 2021, arXiv:2110.01052
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayeslim.decide.predictors import Predictor, Predicts, told_targets
from bayeslim.decide.selective_outputs import (
    STARTS,
    confidence_of_outputs,
    curve,
    fractions,
    largest_risk,
    last_safe,
    loosest_safe,
    risk_bound,
    thresholds,
)
from bayeslim.errors import BayeslimError, check_number
from bayeslim.likelihoods import Likelihood
from bayeslim.results import Prediction
from bayeslim.types import Inputs

TESTS = 200
"""The most sizes k that are tested."""


@dataclass(frozen=True)
class RiskCoverage:
    """The selective risk at every coverage, most confident examples first.

    Attributes:
        coverage: the fractions answered, from 1 / n to 1.
        risk: the risk among them.
    """

    coverage: Tensor
    risk: Tensor

    @property
    def aurc(self) -> float:
        """The area under the curve: the mean risk over all coverages."""
        return float(self.risk.mean())


@dataclass(frozen=True)
class Answers:
    """A prediction with the examples that are answered.

    Attributes:
        prediction: of all examples.
        confidence: of each example, (B,), or of each output, (B, ...).
        answered: whether it is answered, of the same shape.
    """

    prediction: Prediction
    confidence: Tensor
    answered: Tensor

    def __repr__(self) -> str:
        return f"Answers: {int(self.answered.sum()):,} of {self.answered.numel():,}"

    @property
    def classes(self) -> Tensor:
        """The class of every answer; −1 for "don't know"."""
        found = self.prediction.classes
        answered = self.answered.view(*self.answered.shape, *[1] * (found.ndim - self.answered.ndim))
        return torch.where(answered, found, -1)


@dataclass(frozen=True)
class Selective:
    """A predictor that answers or abstains, made by `selective`.

    Attributes:
        predicts: the predictor.
        threshold: θ: it answers where the confidence is above; infinity if no risk could be guaranteed.
        coverage: the fraction of held-out examples it answers.
        risk: the fraction of these that are wrong.
        risk_bound: the risk that holds with probability `confidence`: the `max_risk` that was asked for, or a bound for
            the coverage that was.
        confidence: 1 − δ.
        curve: risk and coverage at all thresholds.
        per_output: whether each output of an example is answered on its own.
    """

    predicts: Predicts
    threshold: float
    coverage: float
    risk: float
    risk_bound: float
    confidence: float
    curve: RiskCoverage
    per_output: bool = False

    def __call__(self, x: Inputs) -> Answers:
        """Answer inputs, or abstain."""
        prediction = self.predicts(x)
        confidence = confidence_of_outputs(prediction) if self.per_output else confidence_of(prediction)
        return Answers(prediction, confidence, confidence > self.threshold)

    def __repr__(self) -> str:
        if self.threshold == math.inf:
            return (
                "Selective: answers nothing, as no risk so small can be shown: pass more held-out data, or allow more"
            )
        return (
            f"Selective: answers {self.coverage:.1%} with risk {self.risk:.2%}, "
            f"at most {self.risk_bound:.2%} with probability {self.confidence:g}"
        )


def selective(
    predictor: Predictor,
    loader: Iterable[Any],
    max_risk: float | None = None,
    confidence: float = 0.95,
    *,
    coverage: float | None = None,
    tolerance: float | None = None,
    per_output: bool = False,
    likelihood: Likelihood | None = None,
    **options: Any,
) -> Selective:
    """Make a predictor that answers where it is sure and abstains elsewhere.

    Args:
        predictor: a Bayesian network, a plain, slim or distilled one, or a function from inputs to outputs.
        loader: held-out data, which neither trained nor tuned the network.
        max_risk: the largest fraction of wrong answers, which holds with probability `confidence`. It takes at least
            3 / max_risk held-out examples, 299 for 0.01; otherwise no input is answered.
        confidence: that probability.
        coverage: the fraction of examples to answer, instead of `max_risk`; more where confidences are equal.
        tolerance: for values: an answer is wrong if it is off by more.
        per_output: answer or abstain for each output of an example, such as a pixel, instead of the whole example. The
            risk is then the fraction of wrong ones among the answered outputs, and the guarantee holds over images.
            Values take the first batch for the choice of thresholds alone.
        likelihood: what the outputs mean, where the predictor is not Bayesian.
        **options: of `bayeslim.predict`, for a Bayesian network.

    >>> import bayeslim as bl
    >>> logits, labels = torch.tensor([[4.0, 0.0], [1.0, 0.0]]).repeat(50, 1), torch.tensor([0, 1]).repeat(50)
    >>> made = bl.selective(torch.nn.Identity(), [(logits, labels)], 0.1, likelihood=bl.likelihoods.Categorical())
    >>> made(logits[:2]).classes
    tensor([ 0, -1])
    """
    if (max_risk is None) == (coverage is None):
        raise ValueError("selective needs either max_risk, such as 0.01, or coverage, such as 0.9.")
    for name, value in (("max_risk", max_risk), ("coverage", coverage), ("confidence", confidence)):
        if value is not None:
            check_number(name, value, above=0, below=1)
    if tolerance is not None:
        check_number("tolerance", tolerance, least=0)
    predicts = Predicts(predictor, likelihood, options)
    if per_output:
        return _per_output(predicts, loader, max_risk, 1 - confidence, coverage, tolerance)
    sure: list[Tensor] = []
    lost: list[Tensor] = []
    for prediction, targets in predicts.over(loader):
        _, told = told_targets(prediction, targets, predicts.ignored)
        counts = told.reshape(len(told), -1).any(1).cpu()  # an example without a target is neither right nor wrong
        sure.append(confidence_of(prediction).double().cpu()[counts])
        lost.append(loss_of(prediction, targets, tolerance, predicts.ignored).double().cpu()[counts])
    if not sum(map(len, sure)):
        raise predicts.no_target
    order = torch.cat(sure).argsort(descending=True, stable=True)
    sure_of, loss = torch.cat(sure)[order], torch.cat(lost)[order]
    n = len(order)
    made = RiskCoverage(torch.arange(1, n + 1) / n, loss.cumsum(0) / torch.arange(1, n + 1))
    if max_risk is not None:
        answered = _largest_safe(sure_of, loss, max_risk, 1 - confidence)
    else:
        assert coverage is not None
        answered = int((sure_of >= sure_of[math.ceil(coverage * n) - 1]).sum())  # equal ones are answered alike
    risk = float(loss[:answered].mean()) if answered else 0.0
    threshold = float(sure_of[answered]) if answered < n else -math.inf
    bound = 0.0
    if answered:
        bound = largest_risk(partial(p_value, loss[:answered]), 1 - confidence) if max_risk is None else max_risk
    return Selective(predicts, threshold if answered else math.inf, answered / n, risk, bound, confidence, made)


def _per_output(
    predicts: Predicts,
    loader: Iterable[Any],
    max_risk: float | None,
    delta: float,
    coverage: float | None,
    tolerance: float | None,
) -> Selective:
    grid: Tensor | None = None
    parts: list[tuple[Tensor, Tensor]] = []
    for prediction, given in predicts.over(loader):
        targets, told = told_targets(prediction, given, predicts.ignored)
        if grid is None:
            grid = thresholds(prediction)
            if prediction.kind == "values":
                continue
        parts.append(
            fractions(confidence_of_outputs(prediction), wrong_outputs(prediction, targets, tolerance), told, grid)
        )
    if grid is None or not parts:
        raise BayeslimError("Values need at least two batches: the first one chooses the thresholds.")
    wrong, answered = (torch.cat(part) for part in zip(*parts, strict=True))
    if not len(wrong):
        raise predicts.no_target
    if max_risk is not None:
        place = loosest_safe(wrong, answered, max_risk, delta)
    else:
        assert coverage is not None
        place = min(int((answered.mean(0) < coverage).sum()), len(grid) - 1)
    made = RiskCoverage(*curve(wrong, answered))
    if place is None:
        return Selective(predicts, math.inf, 0.0, 0.0, 0.0, 1 - delta, made, True)
    share = float(answered[:, place].mean())
    risk = float(wrong[:, place].mean()) / max(share, 1e-12)
    bound = risk_bound(wrong[:, place], answered[:, place], delta) if max_risk is None else max_risk
    return Selective(predicts, float(grid[place]), share, risk, bound, 1 - delta, made, True)


def confidence_of(prediction: Prediction) -> Tensor:
    """Compute the confidence of every example, (B,).

    It is the mean over the outputs of the example.
    """
    each = confidence_of_outputs(prediction)
    return each.reshape(len(each), -1).mean(1)


def loss_of(
    prediction: Prediction, targets: Tensor, tolerance: float | None = None, ignored: int | None = None
) -> Tensor:
    """Compute the loss of every example: the fraction of its outputs that are wrong.

    Args:
        prediction: of the examples.
        targets: their targets.
        tolerance: for values: the largest error of an answer that is right.
        ignored: the class index of outputs without a target, which do not count.
    """
    targets, told = told_targets(prediction, targets, ignored)
    wrong = wrong_outputs(prediction, targets, tolerance)
    told = told.reshape(len(told), -1).double()
    return (wrong.reshape(len(wrong), -1).double() * told).sum(1) / told.sum(1).clamp_min(1)


def wrong_outputs(prediction: Prediction, targets: Tensor, tolerance: float | None) -> Tensor:
    """Tell which outputs are wrong, (B, ...).

    Args:
        prediction: of the examples.
        targets: their targets, aligned with the outputs.
        tolerance: for values: the largest error of an answer that is right.
    """
    if prediction.kind == "classes":
        return prediction.classes != targets
    if tolerance is None:
        raise ValueError("For values an answer is wrong if it is off by more than tolerance=... Pass it.")
    return (prediction.mean - targets).abs() > tolerance


def _largest_safe(sure: Tensor, loss: Tensor, max_risk: float, delta: float) -> int:
    """Find the largest number of answers whose risk is below `max_risk` at level δ.

    Equal confidences are above a threshold together: it may answer fewer than k.
    """
    n = len(sure)

    def fewest(starts: int) -> int:  # fewer cannot be shown to be safe, even without errors
        return math.ceil(math.log(delta / starts) / math.log1p(-max_risk))

    starts = STARTS if n >= fewest(STARTS) else 1
    least = fewest(starts)
    sizes = torch.linspace(min(least, n), n, TESTS, dtype=torch.float64).round().long().unique().tolist()
    counts = [int((sure > sure[k]).sum()) if k < n else n for k in sizes]

    def p_value_of(place: int) -> float:
        count = counts[place]
        return 0.0 if count < least else p_value(loss[:count], max_risk)  # too few are passed over

    found = last_safe(p_value_of, len(counts), delta, starts)
    return counts[found] if found is not None and counts[found] >= least else 0


def p_value(loss: Tensor, risk: float) -> float:
    """Bound the probability of a loss this small if the expected loss were `risk`."""
    n, total = len(loss), float(loss.sum())
    if bool(((loss == 0) | (loss == 1)).all()):
        return _binomial_cdf(round(total), n, risk)
    mean = min(total / n, risk)
    entropy = sum(a * math.log(a / b) for a, b in ((mean, risk), (1 - mean, 1 - risk)) if a > 0)
    return min(math.exp(-n * entropy), math.e * _binomial_cdf(math.ceil(total), n, risk), 1.0)


def _binomial_cdf(successes: int, n: int, p: float) -> float:
    """Compute P(X ≤ successes) of X ~ Bin(n, p), summed in logarithms."""
    if successes >= n or p <= 0:
        return 1.0
    if p >= 1:
        return 0.0
    k = torch.arange(successes + 1, dtype=torch.float64)
    log_choose = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return float(torch.logsumexp(log_choose + k * math.log(p) + (n - k) * math.log1p(-p), 0).exp().clamp(max=1.0))
