"""Learned noise of several networks: one likelihood for all, with averaged parameters.

Every network of an ensemble, or of several chains, is trained with its own parameters of the likelihood, such as log σ
of a Gaussian. Predictions have one likelihood, so these parameters are averaged; for log σ that is the geometric mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bayeslim.train.distributed import rank_and_world
from bayeslim.types import Params


def noise_of(likelihood: nn.Module) -> Params:
    """Copy the parameters that a likelihood has learned; empty if it has none."""
    return {name: value.detach().clone() for name, value in likelihood.state_dict().items()}


def average_noise_(likelihood: nn.Module, noises: Sequence[Params], *, between_ranks: bool = False) -> None:
    """Set a likelihood to the average of its parameters with each network.

    Ranks have equally many networks; `between_ranks` averages over them too.
    """
    mean = {name: torch.stack([each[name] for each in noises]).mean(0) for name in noises[0]}
    world = rank_and_world()[1]
    if between_ranks and world > 1:
        for value in mean.values():
            torch.distributed.all_reduce(value)
            value.div_(world)
    likelihood.load_state_dict(mean)
