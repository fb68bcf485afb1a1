"""The error of a plain network on validation data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bayeslim.errors import BayeslimError, ShapeMismatch
from bayeslim.likelihoods import Likelihood
from bayeslim.types import call, device_of, split_batch, to_device


def error_of(network: nn.Module, likelihood: Likelihood, loader: Iterable[Any]) -> tuple[float, bool]:
    """In per cent for classes (True), else the root mean squared error (False)."""
    network = network.eval()
    wrong, count, percent = 0.0, 0, True
    for batch in loader:
        inputs, targets = to_device(split_batch(batch), device_of(network))
        with torch.no_grad():
            prediction = likelihood.predict(call(network, inputs).unsqueeze(0))
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
