"""Batch norms of a network: which modules they are, and a mode in which they measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayeslim.stochastic import evaluating
from bayeslim.types import Inputs, batch_size, call

TOO_SMALL = (
    "A batch norm measures the variance of a batch, and the batches of the loader have one row each. Use a larger "
    "batch_size."
)


def norms_of(model: nn.Module) -> dict[str, _BatchNorm]:
    """Find the batch norms that keep statistics, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}


@contextmanager
def measuring(model: nn.Module, momentum: float | None) -> Iterator[None]:
    """Put only norms in training mode inside; restore all modes on exit.

    The momentum is the weight of a new batch: None averages all batches, 1 takes the last.
    """
    norms = norms_of(model).values()
    before = [norm.momentum for norm in norms]
    with evaluating(model), torch.no_grad():
        for norm in norms:
            norm.momentum = momentum
            norm.training = True
        try:
            yield
        finally:
            for norm, own in zip(norms, before, strict=True):
                norm.momentum = own
                norm.training = False


def measured(model: nn.Module, inputs: Inputs) -> bool:
    """Run a batch inside `measuring`, and tell whether its statistics were measured.

    A batch of one row may have one value per channel, of which a norm refuses to take the variance. It leaves the
    statistics as they were.
    """
    buffers = [buffer for norm in norms_of(model).values() for buffer in norm.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        call(model, inputs)
    except ValueError:
        if batch_size(inputs) > 1:
            raise
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        return False
    return True
