"""Fitting again: while it lasts the network stands for itself, and if it fails, all is as it was before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from bayeslim.posteriors.particles import tensors_of

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


@contextmanager
def restored_on_failure(bnn: Bayesian) -> Iterator[None]:
    """Take the posterior away; if what follows fails, put it back, with the weights, buffers and noise it belongs to.

    A network that had no posterior yet is left where the failure found it.
    """
    previous: dict[str, Any] = {key: bnn.state.pop(key) for key in ("posterior", "networks") if key in bnn.state}
    if not previous:
        yield
        return
    step, before = bnn.step, {name: tensor.detach().clone() for name, tensor in tensors_of(bnn).items()}
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for name, tensor in tensors_of(bnn).items():
                tensor.copy_(before[name])
        bnn.step = step
        bnn.state.update(previous)
        raise
