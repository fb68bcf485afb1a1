"""Batch norms of a network: which modules they are, and a mode in which they measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from bayeslim.stochastic import evaluating


def norms_of(model: nn.Module) -> list[_NormBase]:
    """List the modules that keep statistics of batches."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]


@contextmanager
def measuring(model: nn.Module, momentum: float | None) -> Iterator[None]:
    """Put only norms in training mode inside; restore all modes on exit.

    The momentum is the weight of a new batch: None averages all batches, 1 takes the last.
    """
    norms = norms_of(model)
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
