"""Statistics of batch norms, measured anew after a cut.

A cut changes the distribution of every layer's outputs, and a batch norm divides by the statistics of the network
before the cut. So the mean network passes over the data once more, and its batch norms average the statistics of all
batches.
"""

from __future__ import annotations

from typing import Any

import torch

from bayeslim.bayesian import Bayesian
from bayeslim.methods.shared.batch_norms import norms_of
from bayeslim.methods.shared.batch_statistics import measure_again_
from bayeslim.posteriors import Particles


def measure_batch_norms(bnn: Bayesian, loader: Any) -> int:
    """Measure the statistics of all batch norms of the mean network anew, in place.

    Every particle of a posterior has statistics of its own; they are left alone.

    Returns:
        the number of batch norms.
    """
    own = norms_of(bnn.model)
    if not own or isinstance(bnn.posterior_, Particles):
        return 0
    network = bnn.mean_network()
    measure_again_(network, loader, between_ranks=False)
    with torch.no_grad():
        for name, norm in norms_of(network).items():
            buffers = dict(own[name].named_buffers(recurse=False))
            for key, value in norm.named_buffers(recurse=False):
                buffers[key].copy_(value)
    return len(own)
