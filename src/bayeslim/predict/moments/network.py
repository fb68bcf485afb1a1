"""A network on moments: from inputs to Gaussian outputs, and from these to a `Prediction`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import UnsupportedModel
from bayeslim.posteriors import Diagonal, Posterior
from bayeslim.predict.moments.draws import Outputs, summarise
from bayeslim.predict.moments.tensor import Moments, NoRule
from bayeslim.results import Prediction
from bayeslim.types import Inputs, arguments, call, device_of

SAMPLES = 256
"""Draws of the outputs by default."""


def predict(
    bnn: Bayesian,
    batches: Callable[[], Iterator[Inputs]],
    samples: int,
    generator: torch.Generator | None = None,
) -> Prediction:
    """Predict by moments, for a posterior of independent Gaussians."""
    posterior = bnn.posterior_
    if not isinstance(posterior, Diagonal):
        raise UnsupportedModel(
            f'how="moments" needs a posterior of independent Gaussian weights. {bnn.method.name} gave a '
            f'{posterior.kind} one. how="sample" works for any posterior.'
        )
    outputs = Outputs.joined([Outputs.of(moments(bnn.model, posterior, inputs)) for inputs in batches()])
    return summarise(bnn.likelihood, outputs, samples, generator)


def moments(model: nn.Module, posterior: Posterior, inputs: Inputs) -> Moments:
    """Compute the moments of the outputs under a posterior of independent Gaussians."""
    known = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if t.dtype in _HALF}
    params = {name: _precise(tensor) for name, tensor in known.items()}
    for name, variance in posterior.variance.items():
        mean = _precise(posterior.mean[name])
        params[name] = Moments.of(mean, variance.to(mean.dtype), frozenset({name}))
    try:
        with torch.autocast(device_of(model).type, enabled=False):
            output = call(model, _precise_inputs(inputs), params)
    except NoRule as error:
        raise UnsupportedModel(
            f'how="moments" cannot go through {_place(error, model)}: {error}. how="sample" works for any network.'
        ) from error
    return output if isinstance(output, Moments) else Moments.of(output, torch.zeros_like(output), frozenset())


_HALF = (torch.float16, torch.bfloat16)


def _precise(tensor: Tensor) -> Tensor:
    """Cast half precision to single: the variance of a weight would underflow."""
    return tensor.float() if tensor.dtype in _HALF else tensor


def _precise_inputs(inputs: Inputs) -> Inputs:
    args, kwargs = arguments(inputs)
    if kwargs:
        return {name: _precise(v) if isinstance(v, Tensor) else v for name, v in kwargs.items()}
    return tuple(_precise(v) if isinstance(v, Tensor) else v for v in args)


def _place(error: NoRule, model: nn.Module) -> str:
    """Describe the innermost module whose forward raised the error."""
    paths = {id(module): (path, module) for path, module in model.named_modules()}
    path, found = "", model
    step = error.__traceback__
    while step is not None:
        path, found = paths.get(id(step.tb_frame.f_locals.get("self")), (path, found))
        step = step.tb_next
    kind = type(found).__name__
    return f'"{path}" ({kind})' if path else kind
