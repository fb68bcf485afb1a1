"""The error of a plain network on validation data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bayeslim.likelihoods import Likelihood
from bayeslim.prune.search import error_of_predictions
from bayeslim.results import Prediction
from bayeslim.train.loaders import ignored_class
from bayeslim.types import Inputs, call, device_of


def error_of(network: nn.Module, likelihood: Likelihood, loader: Iterable[Any]) -> tuple[float, bool]:
    """Compute the validation error: in per cent for classes (True), else the RMSE."""
    network = network.eval()

    def predicted(inputs: Inputs) -> Prediction:
        with torch.no_grad():
            return likelihood.predict(call(network, inputs).unsqueeze(0))

    return error_of_predictions(predicted, loader, device_of(network), ignored_class(likelihood))
