"""Scores of a mixture from the scores of its components: −log Σ_c π_c exp(−cost_c).

The cost of a component is minus the logarithm of its density, or of its probability mass. A mixture needs this: its
mean and variance alone would take a weight that is −1 or +1 for one that may well be zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayeslim.posteriors import Mixture
from bayeslim.types import Params


def mixed_weights(posterior: Mixture, costs: Sequence[Params]) -> Params:
    """Mix the components' costs of single weights, by parameter name."""
    return {name: minus_log_mean(posterior, torch.stack([cost[name] for cost in costs])) for name in costs[0]}


def mixed_units(posterior: Mixture, costs: Sequence[Tensor]) -> Tensor:
    """Mix the components' costs of units."""
    return minus_log_mean(posterior, torch.stack([cost.double() for cost in costs]))


def minus_log_mean(posterior: Mixture, costs: Tensor) -> Tensor:
    """Mix the stacked costs of all components, (C, ...)."""
    log_weights = posterior.log_weights.to(costs.device).view(-1, *[1] * (costs.ndim - 1))
    # log π added to the infinite cost of a component with weight zero would be undefined
    return -(log_weights - costs).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).logsumexp(0)
