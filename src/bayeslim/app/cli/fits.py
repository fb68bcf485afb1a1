"""Checks that a network, a likelihood and data fit together, before any work is done."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bayeslim.app.cli.calls import BadSetting, first_line
from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError
from bayeslim.likelihoods import Categorical, Gaussian, Likelihood
from bayeslim.replica import replicate
from bayeslim.train.loaders import TensorPairs
from bayeslim.types import Inputs, call, device_of, split_batch, to_device


def run_on(bnn: Bayesian, inputs: Inputs, network: str, data: str) -> Tensor:
    """Compute the outputs of the mean network on a batch, or raise a `BadSetting`.

    Its error has the names of the `network` and of the `data`.
    """
    try:
        with torch.no_grad():
            return call(replicate(bnn.model), to_device(inputs, device_of(bnn.model)))
    except BayeslimError:
        raise
    except Exception as error:  # a network may raise anything on inputs that it does not take
        shape = f", whose inputs are {'x'.join(map(str, inputs.shape[1:]))}" if isinstance(inputs, Tensor) else ""
        raise BadSetting(f"{network} does not run on {data}{shape}: {first_line(error).rstrip('.')}.") from error


def check_fits_data(bnn: Bayesian, train: Any, val: Any, model: str, data: str) -> None:
    """Raise a `BadSetting` for a network that cannot learn these data.

    It has the names of the `model` and of the `data`, and for a network of the zoo the arguments to change. Training
    data are not read, for that would change their order.
    """
    inputs, targets = split_batch(next(iter(val)))
    pairs = getattr(train, "dataset", None)
    seen = pairs.y if isinstance(pairs, TensorPairs) else targets
    try:
        outputs = run_on(bnn, inputs, f'model="{model}"', data)
        classes = outputs.shape[bnn.likelihood.class_dim] if isinstance(bnn.likelihood, Categorical) else None
        if classes is not None and not seen.is_floating_point() and int(seen.max()) >= classes:
            raise BadSetting(f'model="{model}" has {classes} outputs, and {data} has classes up to {int(seen.max())}.')
        with torch.no_grad():
            bnn.likelihood.log_prob(outputs, to_device(targets, outputs.device))
    except BayeslimError as error:
        fitting = _fitting_arguments(bnn, inputs, seen)
        raise BadSetting(f"{error}{f' For {data} it takes {fitting}.' if fitting else ''}") from error


def outputs_for(likelihood: Likelihood | None, targets: int) -> int:
    """Count the outputs of a network for this number of targets, or of classes."""
    return 2 * targets if isinstance(likelihood, Gaussian) and likelihood.mode == "heteroscedastic" else targets


def _fitting_arguments(bnn: Bayesian, inputs: Inputs, targets: Tensor) -> str:
    """Find the arguments of a network of the zoo that must change to fit the data."""
    given = getattr(bnn.model, "zoo_config", {})
    if not isinstance(inputs, Tensor):
        return ""
    shape = inputs.shape[1:]
    outputs = math.prod(targets.shape[1:]) if targets.is_floating_point() else int(targets.max()) + 1
    fitting = {"inputs": math.prod(shape), "classes": outputs_for(bnn.likelihood, outputs)}
    if len(shape) == 3:
        fitting |= {"in_channels": shape[0], "image_size": shape[-1]}
    return ", ".join(f"{name}={value}" for name, value in fitting.items() if given.get(name, value) != value)
