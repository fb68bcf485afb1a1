"""The quality of a network on held-out data, for every kind of targets.

For classes and yes/no targets the error is the fraction that is wrong, and there is a reliability curve; for values and
counts it is the root mean squared error, and the curve compares central intervals of the prediction with how often
they hold the target.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.app.report.quantities import number, percent
from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, ShapeMismatch
from bayeslim.likelihoods import Likelihood
from bayeslim.metrics import Calibration, Classification
from bayeslim.predict.predict import predict
from bayeslim.replica import replicate
from bayeslim.results import Prediction
from bayeslim.types import Inputs, call, device_of, split_batch, to_device

Batches = Sequence[tuple[Inputs, Tensor]]
LEVELS = torch.arange(1, 20, dtype=torch.float64) / 20
"""The probabilities of the central intervals that are counted."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The quality of predictions.

    Attributes:
        kind: of the targets: "classes", "binary", "values" or "counts".
        count: the number of targets.
        error: the fraction that is wrong; for values and counts the root mean squared error.
        nll: the mean of −log p(y).
        calibration: the reliability curve; for values and counts the coverage of central intervals.
    """

    kind: str
    count: int
    error: float
    nll: float
    calibration: Calibration

    @property
    def is_fraction(self) -> bool:
        """Whether the error is a fraction of the targets; else it is an RMSE."""
        return self.kind in ("classes", "binary")

    @property
    def ece(self) -> float:
        """The mean gap of the calibration curve.

        For classes and yes/no targets this is the expected calibration error, otherwise that of the intervals.
        """
        return self.calibration.ece

    @property
    def error_text(self) -> str:
        """The error as it is written: in per cent, or as a number."""
        return percent(self.error, 2) if self.is_fraction else number(self.error, 4)


def collected(loader: Iterable[Any]) -> Batches:
    """Collect the batches of a loader, to read them many times in one order."""
    batches = [split_batch(batch) for batch in loader]
    if not batches:
        raise BayeslimError("The validation loader gave no batches.")
    return batches


def score_network(
    network: nn.Module, likelihood: Likelihood, batches: Batches, params: Mapping[str, Tensor] | None = None
) -> Scores:
    """Score a plain network in evaluation mode, with other parameters if given."""

    def predictions() -> Iterator[tuple[Prediction, Tensor]]:
        for inputs, targets in batches:
            outputs = call(network, to_device(inputs, device_of(network)), params)
            yield likelihood.predict(outputs.unsqueeze(0).to(device_of(likelihood))), targets

    network = replicate(network)
    with torch.no_grad():
        return _score(predictions(), likelihood)


def predict_all(bnn: Bayesian, batches: Batches, samples: int = 32, seed: int = 0) -> Prediction:
    """Predict all batches together with the posterior, by seeded draws."""
    generator = torch.Generator(device_of(bnn.model)).manual_seed(seed)
    return predict(bnn, iter(batches), samples, generator=generator)


def score_prediction(prediction: Prediction, likelihood: Likelihood, batches: Batches) -> Scores:
    """Score a prediction of all batches together."""
    return _score([(prediction, torch.cat([targets for _, targets in batches]))], likelihood)


def _score(predictions: Iterable[tuple[Prediction, Tensor]], likelihood: Likelihood) -> Scores:
    sums = _Sums(likelihood)
    for prediction, targets in predictions:
        sums.add(prediction, targets.to(prediction.mean.device))
    return sums.scores()


class _Sums:
    """Sums for scores, added up batch by batch."""

    def __init__(self, likelihood: Likelihood):
        self.likelihood = likelihood
        self.classes = Classification()
        self.kind, self.count, self.squares, self.nll = "", 0, 0.0, 0.0
        self.covered = torch.zeros(len(LEVELS), dtype=torch.float64)

    def add(self, prediction: Prediction, targets: Tensor) -> None:
        self.kind = prediction.kind
        if prediction.probs is None:
            self._add_values(prediction, targets)
            return
        probs = prediction.probs
        if prediction.kind == "binary":
            probs, targets = torch.stack([1 - probs, probs], -1), targets.reshape(probs.shape).long()
        known = targets != getattr(self.likelihood, "ignore_index", -100)
        self.classes.update(probs[known], targets[known])

    def _add_values(self, prediction: Prediction, targets: Tensor) -> None:
        mean, variance = prediction.mean.double(), prediction.variance.double()
        if mean.numel() != targets.numel():
            raise ShapeMismatch(
                f"The targets must have as many entries as the predictions, {tuple(mean.shape)}. "
                f"Got {tuple(targets.shape)}."
            )
        off = targets.reshape(mean.shape).double() - mean
        self.count += off.numel()
        self.squares += float(off.square().sum())
        if prediction.kind == "values":
            self.nll += float((0.5 * (2 * math.pi * variance).log() + off.square() / (2 * variance)).sum())
        else:
            draws = torch.stack([self.likelihood.log_prob(f, targets) for f in prediction.samples]).double()
            self.nll -= float((draws.logsumexp(0) - math.log(len(draws))).sum())
        inside = torch.special.erf(off.abs() / (2 * variance).sqrt()).flatten().cpu()
        self.covered += (inside[:, None] <= LEVELS).double().sum(0)

    def scores(self) -> Scores:
        if self.kind in ("classes", "binary"):
            found = self.classes.compute()
            return Scores(self.kind, found.count, found.error, found.nll, found.calibration)
        edges = torch.linspace(0, 1, len(LEVELS) + 1, dtype=torch.float64)
        # Every interval is about all targets, so each counts the same in the mean gap.
        curve = Calibration(edges, torch.full((len(LEVELS),), self.count), LEVELS, self.covered / self.count)
        return Scores(self.kind, self.count, math.sqrt(self.squares / self.count), self.nll / self.count, curve)
