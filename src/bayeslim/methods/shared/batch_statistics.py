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
from bayeslim.errors import BayeslimError
from bayeslim.methods.shared.batch_norms import TOO_SMALL, measured, measuring, norms_of
from bayeslim.methods.shared.particle_method import gathered, set_tensors, snapshot
from bayeslim.posteriors import Particles, Posterior
from bayeslim.train.distributed import rank_and_world
from bayeslim.types import Params, device_of, split_batch, to_device


def measure_again_(model: nn.Module, loader: Any, *, between_ranks: bool = True) -> None:
    """Measure the statistics of all batch norms in one pass over the data, in place.

    Averaged `between_ranks`, which then share the data out, or else from the data of this rank alone. Batches of one
    row that has no variance are left out.
    """
    norms = norms_of(model).values()
    if not norms:
        return
    device = device_of(model)
    with measuring(model, momentum=None):
        for norm in norms:
            norm.reset_running_stats()
        found = [measured(model, to_device(split_batch(batch)[0], device)) for batch in loader]
        if found and not any(found):
            raise BayeslimError(TOO_SMALL)
    world = rank_and_world()[1]
    if between_ranks and world > 1:
        for norm in norms:
            for statistic in (norm.running_mean, norm.running_var):
                assert statistic is not None
                torch.distributed.all_reduce(statistic)
                statistic.div_(world)


def drawn(bnn: Bayesian, posterior: Posterior, loader: Any, samples: int) -> Particles:
    """Draw networks with batch statistics of their own, and restore the network."""
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


def of_the_first_rank(params: Params) -> Params:
    """Broadcast the tensors of the first rank to all ranks."""
    if rank_and_world()[1] > 1:
        params = {name: value.contiguous() for name, value in params.items()}
        for value in params.values():
            torch.distributed.broadcast(value, src=0)
    return params
