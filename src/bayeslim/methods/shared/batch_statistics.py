"""Statistics of batch norms for weights that were averaged or drawn instead of trained.

A batch norm in evaluation mode uses the statistics of training. Other weights give it other inputs, so its mean and
variance are measured again, as plain averages over the batches of one pass over the data, with the rest of the network
in evaluation mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.methods.shared.batch_norms import measuring, norms_of
from bayeslim.methods.shared.particle_method import gathered, set_tensors, snapshot
from bayeslim.posteriors import Particles, Posterior
from bayeslim.types import Params, call, device_of, split_batch, to_device


def measure_again_(model: nn.Module, loader: Any) -> None:
    """Measure the statistics of all batch norms in one pass over the data, in place."""
    norms = norms_of(model)
    if not norms:
        return
    device = device_of(model)
    with measuring(model, momentum=None):
        for norm in norms:
            norm.reset_running_stats()
        for batch in loader:
            call(model, to_device(split_batch(batch)[0], device))
    if _several_ranks():
        for norm in norms:
            for statistic in (norm.running_mean, norm.running_var):
                assert statistic is not None
                torch.distributed.all_reduce(statistic)
                statistic.div_(torch.distributed.get_world_size())


def drawn(bnn: Bayesian, posterior: Posterior, loader: Any, samples: int) -> Particles:
    """Draw networks from a posterior, each with its own batch statistics.

    The network itself is restored.
    """
    values, rest = snapshot(bnn)
    found = []
    try:
        for _ in range(samples):
            set_tensors(bnn, of_the_first_rank(posterior.sample()))
            measure_again_(bnn.model, loader)
            found.append(snapshot(bnn))
    finally:
        set_tensors(bnn, values | rest)
    return gathered(found)


def _several_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def of_the_first_rank(params: Params) -> Params:
    """Broadcast the tensors of the first rank to all ranks."""
    if _several_ranks():
        params = {name: value.contiguous() for name, value in params.items()}
        for value in params.values():
            torch.distributed.broadcast(value, src=0)
    return params
