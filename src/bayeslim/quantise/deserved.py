"""How many bits a weight deserves on its own: what can be told of its value through the posterior's noise.

    bits = ½ log₂(1 + μ² / s²),      1/s² = P_ii

the capacity of a channel whose signal is the weight and whose noise is the posterior's, given all other weights. It is
zero for a weight that drowns in noise and grows by one with every factor of two that a weight is known better by. In
nats it is the KL of automatic relevance determination.

Shannon 1948
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.quantise.certainty import precision_of
from bayeslim.types import Params

Per = Literal["weight", "unit", "layer"]


@torch.no_grad()
def deserved_bits(bnn: Bayesian, per: Per = "weight") -> Params:
    """Bits that weights deserve by name; infinite for what is known exactly, zero for what was cut.

    Args:
        bnn: a fitted network.
        per: "weight", or the mean of a "unit" (the first dimension) or a "layer" (a parameter).
    """
    if per not in ("weight", "unit", "layer"):
        raise ValueError(f'per must be "weight", "unit" or "layer". Got {per!r}.')
    posterior = bnn.posterior_
    precision = precision_of(posterior)
    return {name: _mean(_bits(mean, precision[name]), per) for name, mean in posterior.mean.items()}


def _bits(mean: Tensor, precision: Tensor) -> Tensor:
    signal = mean.double().square() * precision.to(mean.device)
    return torch.log1p(signal.masked_fill(mean == 0, 0.0)) / (2 * math.log(2))


def _mean(bits: Tensor, per: Per) -> Tensor:
    if per == "weight" or bits.ndim == 0:
        return bits
    return bits.mean() if per == "layer" else bits.flatten(1).mean(1) if bits.ndim > 1 else bits
