"""Bayesian model reduction of gates: the evidence gained by a prior that holds a scale near zero.

    ΔF = log p̃(D) − log p(D) = log E_q[p̃(z) / p(z)]            score = −ΔF

compares the model with the prior p of the gates with one that has the reduced prior p̃ instead, from the posterior q
alone. A gate is closed where the evidence rises, at a score below zero: `bl.Budget(threshold=0.0)` needs no tuning.
With t = log z, `gates.TruncatedLogNormal` has q(t) = N(t | μ, σ²) / Z(μ, σ) and p(t) = 1 / (b − a) on [a, b], where
Z(μ, σ) is the mass of N(μ, σ²) on the interval. Two reduced priors have closed forms:

    "bmrs"          p̃(t) = N(t | a, s²) / Z(a, s), a spike at the smallest scale, with s = 1e−6
                    ΔF = log(b − a) + log N(a | μ, σ² + s²) + log Z(m, v) − log Z(μ, σ) − log Z(a, s)
                    v² = 1 / (1/σ² + 1/s²),  m = v² (μ/σ² + a/s²)
    "bmrs_uniform"  p̃(t) = 1 / (b′ − a′) on [a′, b′], the logarithms of 2⁻²³ and 2⁻⁸
                    ΔF = log q(a′ ≤ t ≤ b′) − log (b′ − a′) / (b − a)

The spike's ΔF tends to the Savage-Dickey ratio log q(a) / p(a) as s goes to zero. The uniform prior calls zero what is
below the precision of eight bits, and closes more gates. A gate that learned nothing, q = p, has a ΔF of zero under
both. On the way there σ is wide, and the spike gains evidence only if μ has moved near the smallest scale, below about
−13 on [−20, 0]. So "bmrs" needs long training, and may find nothing to cut after a short one.

A mean network also closes the gates whose signal-to-noise ratio is at most the gate's `threshold`. With
`TruncatedLogNormal(threshold=0.0)` the evidence alone decides.

Wright, Igel & Selvan 2024, arXiv:2406.01345 · Friston & Penny 2011
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bayeslim.gates import TruncatedLogNormal
from bayeslim.gates.truncated_normal import HALF_LOG_2PI, log_mass
from bayeslim.posteriors import Scales
from bayeslim.prune.criteria.gates import gate_criterion
from bayeslim.types import Params

SPIKE_STD = 1e-6
"""The standard deviation of the spike in log z."""
LOG_SMALLEST = -23 * math.log(2)
"""The log of the last bit of a float32 of size one."""
BITS = 8
"""The precision in bits below which a scale counts as zero."""


def gain_of_spike(gate: TruncatedLogNormal, own: Params, spike_std: float = SPIKE_STD) -> Tensor:
    """Compute ΔF of a spike at the smallest scale, for every gate."""
    mean, log_std, low, high = gate.standardised(own)
    std, width = log_std.exp(), gate.log_high - gate.log_low
    wider = (std.square() + spike_std**2).sqrt()
    at_low = -0.5 * ((mean - gate.log_low) / wider).square() - wider.log() - HALF_LOG_2PI
    both = std * spike_std / wider  # v
    # (a − m) / v, without the difference of two numbers that are nearly equal
    start = -both * (mean - gate.log_low) / std.square()
    left = log_mass(start, start + width / both) - log_mass(low, high)
    zero = torch.zeros_like(mean)
    return math.log(width) + at_low + left - log_mass(zero, zero + width / spike_std)


def gain_of_uniform(gate: TruncatedLogNormal, own: Params, bits: float = BITS) -> Tensor:
    """Compute ΔF of a log-uniform prior below 2^−bits, for every gate."""
    mean, log_std, low, high = gate.standardised(own)
    ends = max(gate.log_low, LOG_SMALLEST), min(gate.log_high, -bits * math.log(2))
    if not ends[0] < ends[1]:
        raise ValueError(
            f"bits must put the reduced prior inside the gates' interval [{gate.log_low:g}, {gate.log_high:g}] of "
            f"log z. Got {bits:g} bits, which gives [{ends[0]:g}, {ends[1]:g}]."
        )
    std = log_std.exp()
    inside = log_mass((ends[0] - mean) / std, (ends[1] - mean) / std) - log_mass(low, high)
    return inside - math.log((ends[1] - ends[0]) / (gate.log_high - gate.log_low))


def _score(gain: Callable[[TruncatedLogNormal, Params], Tensor], scales: Scales) -> Tensor:
    if not isinstance(scales.gate, TruncatedLogNormal):
        raise TypeError(
            "Bayesian model reduction has a closed form for gates.TruncatedLogNormal(). Got "
            f'{type(scales.gate).__name__}. Use criterion="gates".'
        )
    return -gain(scales.gate, scales.own)


BMRS = gate_criterion("bmrs", partial(_score, gain_of_spike))
BMRS_UNIFORM = gate_criterion("bmrs_uniform", partial(_score, gain_of_uniform))
