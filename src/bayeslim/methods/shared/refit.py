"""Fitting again: if it fails, the network and its posterior are restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bayeslim.bayesian import Bayesian
from bayeslim.posteriors.particles import tensors_of


@contextmanager
def restored_on_failure(bnn: Bayesian) -> Iterator[None]:
    """Remove the posterior inside; on an exception restore it and its weights."""
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
