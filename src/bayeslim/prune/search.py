"""How many candidates go: for counted goals the fewest that meet them, for measured ones the most that do no harm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, ShapeMismatch
from bayeslim.evidence.log_evidence import log_evidence
from bayeslim.posteriors import Particles
from bayeslim.predict.predict import predict
from bayeslim.prune.budget import Budget
from bayeslim.results import Prediction
from bayeslim.train.progress import progress
from bayeslim.types import Inputs, device_of, split_batch, to_device

RESOLUTION = 0.01
"""Searches on data end when what is left is known to this fraction."""
EVIDENCE_SAMPLES = 8


def fewest(price: Callable[[int], float], target: float, low: int, high: int) -> int:
    """The smallest count in low..high whose price is at most the target; prices fall with the count.

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
    """The largest count in low..high found harmless, by bisection on the logarithm of what is left of `total`.

    >>> most(lambda count: count <= 70, low=0, high=99, total=100)
    70
    """
    probes = math.ceil(math.log2(max(2.0, math.log(max(1, total - low) / max(1, total - high)) / RESOLUTION))) + 1
    with progress(range(0), "searching the cut", total=probes) as bar:
        if low < high and harmless(high):
            return high
        while high - low > max(1, RESOLUTION * (total - high)):
            middle = total - round(math.sqrt(max(1, total - low) * max(1, total - high)))
            middle = min(max(middle, low + 1), high - 1)
            if harmless(middle):
                low = middle
            else:
                high = middle
            bar.advance()
    return low


def harm(bnn: Bayesian, budget: Budget, validate: Iterable[Any], share: float) -> Callable[[Bayesian], bool]:
    """Whether a pruned network is still as good as the goal wants.

    Args:
        bnn: the network to compare with.
        budget: with the goal "max_error_increase" or "evidence".
        validate: validation data, as a loader.
        share: the fraction of the error's increase that may be used.
    """
    if budget.goal == "evidence":
        reference = _evidence(bnn, validate)
        return lambda pruned: _evidence(pruned, validate) >= reference
    before, percent = validation_error(bnn, validate)
    allowed = before + share * budget.value * (1 if percent else before / 100)
    return lambda pruned: validation_error(pruned, validate)[0] <= allowed + 1e-9


def validation_error(bnn: Bayesian, loader: Iterable[Any]) -> tuple[float, bool]:
    """The error of the mean network: in per cent for classes (True), else the root mean squared error (False).

    Of particles it is the error of all of them together, since their mean may be no network worth having.
    """
    how = "sample" if isinstance(bnn.posterior_, Particles) else "mean"

    def predicted(inputs: Inputs) -> Prediction:
        return predict(bnn, inputs, how=how, batch_size=None)

    return error_of_predictions(predicted, loader, device_of(bnn.model))


def error_of_predictions(
    predicted: Callable[[Inputs], Prediction], loader: Iterable[Any], device: torch.device
) -> tuple[float, bool]:
    """The error over a loader: in per cent for classes (True), else the root mean squared error (False).

    Args:
        predicted: what is predicted for inputs.
        loader: of inputs and targets.
        device: where they are to be.
    """
    wrong, count, percent = 0.0, 0, True
    for batch in loader:
        inputs, targets = to_device(split_batch(batch), device)
        prediction = predicted(inputs)
        percent = prediction.probs is not None
        answer = prediction.classes if percent else prediction.mean
        if answer.numel() != targets.numel():
            raise ShapeMismatch(
                f"The validation targets must have as many entries as the predictions, {tuple(answer.shape)}. "
                f"Got {tuple(targets.shape)}."
            )
        off = answer.reshape(targets.shape) - targets
        wrong += float(((off != 0) if percent else off.square()).double().sum())
        count += targets.numel()
    if not count:
        raise BayeslimError("The validation loader gave no batches.")
    return (100 * wrong / count, True) if percent else (math.sqrt(wrong / count), False)


def _evidence(bnn: Bayesian, loader: Iterable[Any]) -> float:
    # The same random numbers for every candidate, so that their difference is what the cut does.
    generator = torch.Generator(device_of(bnn.model)).manual_seed(0)
    return log_evidence(bnn, loader, EVIDENCE_SAMPLES, generator=generator).value
