"""A noise that is learned with several networks: one for all of them, the average of what each had learned.

Networks of an ensemble, or of several chains, each come with parameters of the likelihood that were trained along, such
as log σ of a Gaussian. Predictions and their variances have one likelihood, so these are averaged: of log σ, the
geometric mean of the noises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bayeslim.types import Params


def noise_of(likelihood: nn.Module) -> Params:
    """A copy of what a likelihood has learned so far; nothing where it is fixed."""
    return {name: value.detach().clone() for name, value in likelihood.state_dict().items()}


def average_noise_(likelihood: nn.Module, noises: Sequence[Params], *, between_ranks: bool = False) -> None:
    """Put a likelihood to the average of what it had learned with each network.

    Args:
        likelihood: the likelihood.
        noises: what it had learned, by `noise_of`.
        between_ranks: whether every rank has as many of its own, to be averaged too.
    """
    mean = {name: torch.stack([each[name] for each in noises]).mean(0) for name in noises[0]}
    if between_ranks and torch.distributed.is_available() and torch.distributed.is_initialized():
        for value in mean.values():
            torch.distributed.all_reduce(value)
            value.div_(torch.distributed.get_world_size())
    likelihood.load_state_dict(mean)
