"""Statistics of batch norms, measured anew after a cut.

A cut changes the distribution of every layer's outputs, and a batch norm divides by the statistics of the network
before the cut. So the mean network passes over the data once more, and its batch norms average the statistics of all
batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayeslim.bayesian import Bayesian
from bayeslim.posteriors import Particles
from bayeslim.types import call, device_of, split_batch, to_device


def tracking_norms(network: nn.Module) -> dict[str, _BatchNorm]:
    """Find the batch norms that keep running statistics, by name."""
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def measure_batch_norms(bnn: Bayesian, loader: Iterable[Any]) -> int:
    """Measure the statistics of all batch norms of the mean network anew, in place.

    Every particle of a posterior has statistics of its own; they are left alone.

    Returns:
        the number of batch norms.
    """
    if not tracking_norms(bnn.model) or isinstance(bnn.posterior_, Particles):
        return 0
    network = bnn.mean_network().eval()
    norms = tracking_norms(network)
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over all batches
        norm.train()
    device = device_of(network)
    with torch.no_grad():
        for batch in loader:
            call(network, to_device(split_batch(batch)[0], device))
        for name, norm in norms.items():
            own = dict(bnn.model.get_submodule(name).named_buffers(recurse=False))
            for key, value in norm.named_buffers(recurse=False):
                own[key].copy_(value)
    return len(norms)
