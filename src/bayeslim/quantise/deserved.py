"""The information in a single weight: the bits of its value above the posterior's noise.

    bits = ½ log₂(1 + μ² / s²),      1/s² = P_ii

This is the capacity of a Gaussian channel with the weight as signal and the posterior's noise given all other weights.
It is near zero for a weight far below its noise and grows by one each time s halves. In nats it is the KL of automatic
relevance determination.

Shannon 1948
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.quantise.source import price_of_rounding
from bayeslim.types import Params

Per = Literal["weight", "unit", "layer"]


@torch.no_grad()
def deserved_bits(bnn: Bayesian, per: Per = "weight") -> Params:
    """Compute the bits that each weight deserves, by name.

    They are infinite for weights with zero variance and zero for weights that were cut.

    Args:
        bnn: a fitted network.
        per: "weight", or the mean over a "unit" (a slice of the first dimension) or a "layer" (a parameter).
    """
    if per not in ("weight", "unit", "layer"):
        raise ValueError(f'per must be "weight", "unit" or "layer". Got {per!r}.')
    posterior = bnn.posterior_
    precision = price_of_rounding(posterior)
    return {name: _mean(_bits(mean, precision[name]), per) for name, mean in posterior.mean.items()}


def _bits(mean: Tensor, precision: Tensor) -> Tensor:
    signal = mean.double().square() * precision.to(mean.device)
    return torch.log1p(signal.masked_fill(mean == 0, 0.0)) / (2 * math.log(2))


def _mean(bits: Tensor, per: Per) -> Tensor:
    if per == "weight" or bits.ndim == 0:
        return bits
    return bits.mean() if per == "layer" else bits.flatten(1).mean(1) if bits.ndim > 1 else bits
