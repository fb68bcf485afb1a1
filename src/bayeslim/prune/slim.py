"""`compact`: from a pruned network to a plain one that is really smaller."""

from __future__ import annotations

from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.compact import compact_network
from bayeslim.compact.example import with_batch_size
from bayeslim.export.stored import EXAMPLE
from bayeslim.types import Inputs, to_device


def compact(
    network: Bayesian | nn.Module, example: Inputs, *, tolerance: float = 1e-6, drop_inputs: bool = False
) -> nn.Module:
    """A plain network without the units that were cut, checked to answer as the masked one does.

    Args:
        network: a pruned Bayesian network, of which the mean network is taken; or a plain one with zeros.
        example: inputs on which to trace and to check: a tensor, a tuple of arguments or a dict.
        tolerance: the largest difference allowed, relative to the largest output.
        drop_inputs: read only the input features that the first layers use.
    """
    masks, plain = (network.masks, network.mean_network()) if isinstance(network, Bayesian) else (None, network)
    slim = compact_network(plain, masks, example, tolerance=tolerance, drop_inputs=drop_inputs)
    # What it was traced on stays with it, so that `save` can store it without its class; a plain attribute.
    object.__setattr__(slim, EXAMPLE, with_batch_size(to_device(example, "cpu"), 2))
    return slim
