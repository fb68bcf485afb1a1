"""The configurational temperature of a chain: whether its networks lie too far apart, or too close.

    T_conf = E[(w − E[w]) · ∇U(w)] / n          U(w) = −log p(D, w),  n weights

For draws from p(w|D)^(1/T) this is T, whatever the posterior is, by integration by parts. A chain that minibatches or
large steps have heated has more. A chain that is over-cooled, or that has not moved far from its start, has less.

Rugh 1997 · Leimkuhler & Matthews 2015, section 6.1
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, UnsupportedModel
from bayeslim.methods.shared.full_batch import FullBatch
from bayeslim.methods.shared.moving import Moving
from bayeslim.methods.shared.particle_method import set_tensors
from bayeslim.posteriors.particles import Particles
from bayeslim.stochastic import evaluating

TOLERANCE = 0.1
"""A relative error of the temperature up to this counts as right."""


@dataclass(frozen=True)
class Temperature:
    """The configurational temperature of a chain.

    Attributes:
        value: the estimate of T.
        standard_error: its standard error, as if the networks were independent.
        target: the temperature that the method was to sample at.
    """

    value: float
    standard_error: float
    target: float

    @property
    def verdict(self) -> str:
        """The state of the chain: "hot", "cold" or "right".

        It is right if it is off by less than a tenth, or by less than two standard errors.
        """
        off = self.value / self.target - 1
        if abs(off) < TOLERANCE or abs(off) < 2 * self.standard_error / self.target:
            return "right"
        return "hot" if off > 0 else "cold"

    def __str__(self) -> str:
        advice = {
            "right": "as it should be",
            "hot": "too wide: use a smaller lr, or larger batches",
            "cold": "too narrow: run it for longer, use a smaller lr, or draw batches with replacement",
        }
        return f"temperature {self.value:.2f} ± {self.standard_error:.2f} of {self.target:g}: {advice[self.verdict]}"


def temperature(bnn: Bayesian, loader: Any) -> Temperature:
    """Estimate the configurational temperature of the networks of a sampler.

    It takes one pass over the data for every network.

    Args:
        bnn: a network fitted by a sampler, such as `bl.SGLD` or `bl.HMC`.
        loader: the training data.
    """
    posterior = bnn.posterior_
    if not isinstance(posterior, Particles):
        raise UnsupportedModel(
            f"A temperature is that of a chain of networks, and the posterior of {bnn.method.name} is a "
            f"{type(posterior).__name__}. Use a sampler, such as bl.SGLD() or bl.HMC()."
        )
    length = posterior.count // posterior.chains
    if length < 2:
        raise BayeslimError(f"A temperature needs at least two networks of a chain. Got {length}.")
    twin = copy.deepcopy(bnn)
    with evaluating(twin):
        potential = FullBatch(twin, Moving.all_of(twin), loader)
        points, gradients = [], []
        for k in range(posterior.count):
            set_tensors(twin, posterior.network(k, twin.model))
            points.append(potential.vector())
            gradients.append(potential(points[-1])[1])
    where, forces = (
        torch.stack(rows).double().unflatten(0, (posterior.chains, length)) for rows in (points, gradients)
    )
    moved = int((where != where[:, :1]).any(1).any(0).sum())  # those of a subset alone
    each = ((where - where.mean(1, keepdim=True)) * forces).sum(-1) / max(1, moved) * length / (length - 1)
    target = float(getattr(bnn.method, "temperature", 1.0))
    return Temperature(float(each.mean()), float(each.std()) / each.numel() ** 0.5, target)
