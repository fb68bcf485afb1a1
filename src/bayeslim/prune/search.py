"""The size of a cut: the smallest that meets a counted goal, the largest that is harmless for a measured one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, ShapeMismatch
from bayeslim.evidence.log_evidence import log_evidence
from bayeslim.posteriors import Particles
from bayeslim.predict.predict import predict
from bayeslim.prune.budget import Budget
from bayeslim.results import Prediction
from bayeslim.train.loaders import ignored_class
from bayeslim.train.progress import progress
from bayeslim.types import Inputs, device_of, split_batch, to_device

RELATIVE_RESOLUTION = 0.01
"""Searches on data end when the remaining number of candidates is known to this fraction."""
EVIDENCE_SAMPLES = 8
"""Draws per evidence of a candidate cut."""


def fewest(price: Callable[[int], float], target: float, low: int, high: int) -> int:
    """Find the smallest count in low..high whose price is at most the target.

    Prices fall with the count.

    >>> fewest(lambda count: 10 - count, target=7, low=0, high=10)
    3
    """
    while low < high:
        middle = (low + high) // 2
        if price(middle) <= target:
            high = middle
        else:
            low = middle + 1
    return low


def most(harmless: Callable[[int], bool], low: int, high: int, total: int) -> int:
    """Find the largest harmless count in low..high.

    The search is a bisection on the logarithm of the remaining number, of `total`.

    >>> most(lambda count: count <= 70, low=0, high=99, total=100)
    70
    """
    probes = (
        math.ceil(math.log2(max(2.0, math.log(max(1, total - low) / max(1, total - high)) / RELATIVE_RESOLUTION))) + 1
    )
    with progress(range(0), "searching the cut", total=probes) as bar:
        if low < high and harmless(high):
            return high
        while high - low > max(1, RELATIVE_RESOLUTION * (total - high)):
            middle = total - round(math.sqrt(max(1, total - low) * max(1, total - high)))
            middle = min(max(middle, low + 1), high - 1)
            if harmless(middle):
                low = middle
            else:
                high = middle
            bar.advance()
    return low


def harm(bnn: Bayesian, budget: Budget, validate: Iterable[Any], share: float) -> Callable[[Bayesian], bool]:
    """Make the test that a pruned network is still within the goal, or a share of it."""
    if budget.goal == "evidence":
        reference = _evidence(bnn, validate)
        return lambda pruned: _evidence(pruned, validate) >= reference
    before, percent = validation_error(bnn, validate)
    allowed = before + share * budget.value * (1 if percent else before / 100)
    return lambda pruned: validation_error(pruned, validate)[0] <= allowed + 1e-9


def validation_error(bnn: Bayesian, loader: Iterable[Any]) -> tuple[float, bool]:
    """Measure the error of the mean network on validation data.

    It is in per cent for classes (True), else the root mean squared error (False). Particles predict together, since
    their mean may be a bad network.
    """
    how = "sample" if isinstance(bnn.posterior_, Particles) else "mean"

    def predicted(inputs: Inputs) -> Prediction:
        return predict(bnn, inputs, how=how, batch_size=None)

    return error_of_predictions(predicted, loader, device_of(bnn.model), ignored_class(bnn.likelihood))


def error_of_predictions(
    predicted: Callable[[Inputs], Prediction], loader: Iterable[Any], device: torch.device, ignored: int | None = None
) -> tuple[float, bool]:
    """Measure the error: in per cent for classes (True), else the RMSE (False).

    Targets of class `ignored` do not count.
    """
    wrong, count, seen, percent = 0.0, 0, 0, True
    for batch in loader:
        inputs, targets = to_device(split_batch(batch), device)
        prediction = predicted(inputs)
        if not isinstance(targets, Tensor):
            raise TypeError(f"The targets of validate=... must be tensors. Got {type(targets).__name__}.")
        if not _finite(prediction, targets):
            raise BayeslimError(
                "The validation data hold NaN or infinite values, or the network predicts some, so that its error "
                "cannot be measured. Check the inputs and targets of validate=..., and the network's weights."
            )
        percent = prediction.probs is not None
        answer = prediction.classes if percent else prediction.mean
        if answer.numel() != targets.numel():
            raise ShapeMismatch(
                f"The validation targets must have as many entries as the predictions, {tuple(answer.shape)}. "
                f"Got {tuple(targets.shape)}."
            )
        off = answer.reshape(targets.shape) - targets.to(answer.dtype)
        if prediction.kind == "classes":
            told = torch.ones_like(targets, dtype=torch.bool) if ignored is None else targets != ignored
            off = off[told]
            _check_classes(targets[told], prediction)
        wrong += float(((off != 0) if percent else off.square()).double().sum())
        count, seen = count + off.numel(), seen + targets.numel()
    if not seen:
        raise BayeslimError("The validation loader gave no batches.")
    if not count:
        raise BayeslimError(f"All validation targets are {ignored}, the class index of targets that do not count.")
    return (100 * wrong / count, True) if percent else (math.sqrt(wrong / count), False)


def _check_classes(targets: Tensor, prediction: Prediction) -> None:
    """Refuse targets that are no class of the network.

    They would count as errors of every cut alike.
    """
    classes = prediction.mean.shape[-1]
    if targets.numel() and not (int(targets.min()) >= 0 and int(targets.max()) < classes):
        raise ShapeMismatch(
            f"The targets of validate=... must be from 0 to {classes - 1}, as the network has {classes} classes. "
            f"Got {int(targets.min())} to {int(targets.max())}."
        )


def _finite(prediction: Prediction, targets: Tensor) -> bool:
    """Tell whether predictions and targets hold numbers only."""
    values = prediction.mean if prediction.probs is None else prediction.probs
    return bool(torch.isfinite(values).all()) and bool(torch.isfinite(targets).all())


def _evidence(bnn: Bayesian, loader: Iterable[Any]) -> float:
    # The same random numbers for every candidate, so that their difference is due to the cut.
    generator = torch.Generator(device_of(bnn.model)).manual_seed(0)
    return log_evidence(bnn, loader, EVIDENCE_SAMPLES, generator=generator).value
