"""Recalibration on held-out data: a temperature for classes, a scale for values, or Laplace's prior precision.

    p_T(c) ∝ p(c)^(1 / T_c)             one T, or one a class        (temperature scaling of the averaged probabilities)
    N(μ, s σ²),   s = mean((y − μ)² / σ²)                            for values

T maximises the posterior density of log T ~ N(0, 1), given the held-out data,

    Σ_i log p_T(y_i) − ½ Σ_c (log T_c)²

in which this prior weighs no more than a few examples. Without it, data without an error would drive T to zero and all
probabilities to 0 and 1. T is applied to the average over networks: averaging networks that are each calibrated gives
an underconfident average (Rahaman & Thiery 2021). Neither changes which class is the most probable with one T, nor the
mean of values.

Guo et al. 2017, arXiv:1706.04599 · Rahaman & Thiery 2021, arXiv:2007.08792
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.decide.predictors import Predictor, Predicts, need_kind, told_targets
from bayeslim.errors import BayeslimWarning
from bayeslim.evidence import tune_prior
from bayeslim.likelihoods import Likelihood
from bayeslim.methods.laplace import Laplace
from bayeslim.metrics import Classification, expected_calibration_error, gaussian_nll, nll
from bayeslim.results import Prediction
from bayeslim.types import Inputs

What = Literal["temperature", "class temperatures", "prior"]

MAX_ROWS = 2**20
"""The most outputs that temperatures are fitted on; of more (pixels), a random choice."""


@dataclass(frozen=True)
class Calibrated:
    """A recalibrated predictor, made by `calibrate`.

    Attributes:
        predicts: the predictor before the temperature.
        temperature: T, () or (C,) for classes; s of the variance for values.
        before: scores on the held-out data before: "nll", with "error" and
            "ece" for classes, or "coverage" of the 90 % interval for values.
        after: the same after.
    """

    predicts: Predicts
    temperature: Tensor
    before: dict[str, float]
    after: dict[str, float]

    def __call__(self, x: Inputs) -> Prediction:
        """Predict inputs with the temperature."""
        return tempered(self.predicts(x), self.temperature)

    def __repr__(self) -> str:
        rows = [f"{'':10}{'before':>10}{'after':>10}"]
        rows += [f"{name:10}{value:10.4f}{self.after[name]:10.4f}" for name, value in self.before.items()]
        shown = ", ".join(f"{value:.3g}" for value in self.temperature.reshape(-1).tolist())
        return "\n".join([f"Calibrated: temperature {shown}", *rows])


def calibrate(
    predictor: Predictor,
    loader: Iterable[Any],
    what: What = "temperature",
    *,
    likelihood: Likelihood | None = None,
    **options: Any,
) -> Calibrated:
    """Recalibrate a predictor on held-out data.

    Args:
        predictor: a Bayesian network, a plain, slim or distilled one, or a function from inputs to outputs.
        loader: held-out data; it is read many times to tune a prior (a generator is kept in memory for it), else once.
        what: "temperature" is one number; "class temperatures", for classes, one for each, 1 for those without held-out
            examples; "prior" is the prior precision of a `Laplace` network, tuned in a copy.
        likelihood: what the outputs mean, where the predictor is not Bayesian.
        **options: of `bayeslim.predict`, for a Bayesian network.

    >>> import bayeslim as bl
    >>> logits, labels = torch.tensor([[9.0, 0.0]] * 1000), torch.tensor([0] * 900 + [1] * 100)
    >>> made = bl.calibrate(torch.nn.Identity(), [(logits, labels)], likelihood=bl.likelihoods.Categorical())
    >>> made(logits[:1]).probs.round(decimals=2)
    tensor([[0.9000, 0.1000]])
    """
    if what not in ("temperature", "class temperatures", "prior"):
        raise ValueError(f'what must be "temperature", "class temperatures" or "prior". Got {what!r}.')
    predicts = Predicts(predictor, likelihood, options)
    if what == "prior":
        return _with_tuned_prior(predicts, list(loader) if isinstance(loader, Iterator) else loader)
    means, spreads, targets = _gathered(predicts, loader)
    if spreads is not None:
        if what == "class temperatures":
            raise ValueError(
                '"class temperatures" needs predictions of classes. Got values, which have one scale: pass '
                'what="temperature".'
            )
        scale = ((targets - means).square() / spreads).mean()
        before, after = (_value_scores(means, spreads * s, targets) for s in (1.0, scale))
        return Calibrated(predicts, scale, before, after)
    logits = means.clamp_min(torch.finfo(means.dtype).tiny).log()
    temperature = _best_temperature(logits, targets, None if what == "temperature" else _present(targets, logits))
    before, after = (_class_scores((logits / t).softmax(-1), targets) for t in (torch.ones(()), temperature))
    return Calibrated(predicts, temperature, before, after)


def tempered(prediction: Prediction, temperature: Tensor) -> Prediction:
    """Apply a temperature to a prediction.

    The parts of the uncertainty keep their ratio.
    """
    t = temperature.to(prediction.mean.device, prediction.mean.dtype)
    if prediction.kind == "values":
        return dataclasses.replace(
            prediction, aleatoric=prediction.aleatoric * t, epistemic=prediction.epistemic * t, is_gaussian=True
        )
    need_kind(prediction, ("classes",), "A temperature")
    assert prediction.probs is not None
    probs = (prediction.probs.clamp_min(torch.finfo(prediction.probs.dtype).tiny).log() / t).softmax(-1)
    ratio = torch.special.entr(probs).sum(-1) / prediction.entropy.clamp_min(1e-12)
    return dataclasses.replace(
        prediction,
        mean=probs,
        probs=probs,
        aleatoric=prediction.aleatoric * ratio,
        epistemic=prediction.epistemic * ratio,
    )


def _gathered(predicts: Predicts, loader: Iterable[Any]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Collect probabilities, or means and variances, with the targets.

    They have one row for each output.
    """
    kept = _Reservoir()
    for prediction, given in predicts.over(loader):
        need_kind(prediction, ("classes", "values"), "calibrate")
        targets, told = told_targets(prediction, given, predicts.ignored)
        if prediction.kind == "values":
            kept.add(prediction.mean[told].double(), targets[told], prediction.variance[told].double())
        else:
            assert prediction.probs is not None
            kept.add(prediction.probs[told].double(), targets[told])
    mean, target, *spread = kept.rows
    if not len(target):
        raise predicts.no_target
    return mean, spread[0] if spread else None, target


class _Reservoir:
    """A random choice of at most `MAX_ROWS` rows, batch by batch."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, ...]] = []
        self.generator = torch.Generator().manual_seed(0)

    def add(self, *rows: Tensor) -> None:
        """Add the rows of a batch; of too many, those with the largest random keys stay."""
        keys = torch.rand(len(rows[0]), generator=self.generator)
        self.parts.append((keys, *(part.cpu() for part in rows)))
        if sum(len(part[0]) for part in self.parts) > 2 * MAX_ROWS:
            self.parts = [self._chosen()]

    def _chosen(self) -> tuple[Tensor, ...]:
        found = tuple(torch.cat(part) for part in zip(*self.parts, strict=True))
        if len(found[0]) <= MAX_ROWS:
            return found
        places = found[0].topk(MAX_ROWS).indices
        return tuple(part[places] for part in found)

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The rows that were chosen."""
        return self._chosen()[1:]


def _present(targets: Tensor, logits: Tensor) -> Tensor:
    """Tell which classes have examples, (C,), and warn of those that have none."""
    present = targets.long().bincount(minlength=logits.shape[-1]) > 0
    if not bool(present.all()):
        absent = (~present).nonzero().flatten().tolist()
        warnings.warn(
            f"No held-out example is of class {', '.join(map(str, absent))}, whose temperature stays 1. Add some, or "
            'use what="temperature".',
            BayeslimWarning,
            stacklevel=3,
        )
    return present


def _best_temperature(logits: Tensor, targets: Tensor, present: Tensor | None) -> Tensor:
    """Maximise the density of log T.

    Args:
        logits: of the averaged probabilities, (N, C).
        targets: the classes, (N,).
        present: the classes that have a temperature of their own, (C,); None for one temperature.
    """
    free = torch.ones((), dtype=torch.float64) if present is None else present.double()
    log_t = torch.zeros_like(free, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_t], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        own = log_t * free
        loss = torch.nn.functional.cross_entropy(logits / own.exp(), targets.long())
        loss = loss + own.square().sum() / (2 * len(targets))
        loss.backward()
        return loss.detach()

    with torch.enable_grad():
        optimizer.step(closure)
    return (log_t.detach() * free).exp()


def _with_tuned_prior(predicts: Predicts, batches: Iterable[Any]) -> Calibrated:
    bnn = predicts.predictor
    if not isinstance(bnn, Bayesian) or not isinstance(bnn.method, Laplace):
        raise TypeError('what="prior" tunes the prior precision of a fitted Laplace network. Use what="temperature".')
    tuned = copy.deepcopy(bnn)
    tune_prior.by_validation_(tuned, batches)
    after = Predicts(tuned, None, predicts.options)
    scores = []
    for each in (predicts, after):
        means, spreads, targets = _gathered(each, batches)
        scores.append(_class_scores(means, targets) if spreads is None else _value_scores(means, spreads, targets))
    return Calibrated(after, torch.ones(()), *scores)


def _class_scores(probs: Tensor, targets: Tensor) -> dict[str, float]:
    meter = Classification()
    meter.update(probs, targets)
    return {
        "error": meter.compute().error,
        "nll": nll(probs, targets),
        "ece": expected_calibration_error(probs, targets),
    }


def _value_scores(means: Tensor, variances: Tensor, targets: Tensor) -> dict[str, float]:
    z = (targets - means).abs() / variances.sqrt()
    return {
        "nll": gaussian_nll(means, variances, targets),
        "coverage": float((z <= 1.6448536269514722).double().mean()),
    }
