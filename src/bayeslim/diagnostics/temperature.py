"""The temperatures of a chain: whether its networks lie too far apart, or too close.

    T_conf = E[(w − E[w]) · ∇U(w)] / n          U(w) = −log p(D, w),  n weights
    T_kin  = (1 − α/2) N E|v|² / (n lr)         velocity v, friction α, of samplers with momentum

For draws from p(w|D)^(1/T) the configurational temperature is T, whatever the posterior is, by integration by parts. A
chain that minibatches or large steps have heated has more. A chain that is over-cooled, or that has not moved far from
its start, has less. The kinetic temperature is that of the velocities, and costs no pass over the data. It settles
within a few steps, so it cannot tell whether the networks have moved far enough. `bl.SGNHT` holds it at T by its
friction: there it says only whether the thermostat works.

Rugh 1997 · Leimkuhler & Matthews 2015, section 6.1
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """The temperature of a chain.

    Attributes:
        value: the estimate of T, configurational.
        standard_error: its standard error, as if the networks were independent.
        target: the temperature that the method was to sample at.
        kinetic: the kinetic temperature at the kept networks; None for a sampler without momentum, and for a network
            that was loaded from a file.
    """

    value: float
    standard_error: float
    target: float
    kinetic: Temperature | None = None

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
        line = f"temperature {self.value:.2f} ± {self.standard_error:.2f} of {self.target:g}: {advice[self.verdict]}"
        if self.kinetic is None:
            return line
        moving = self.kinetic
        return f"{line}; kinetic {moving.value:.2f} ± {moving.standard_error:.2f}: {moving.verdict}"


def temperature(bnn: Bayesian, loader: Any) -> Temperature:
    """Estimate the configurational and the kinetic temperature of a sampler.

    The configurational one takes a pass over the data for every network. `fit` records the kinetic one of samplers with
    momentum, `bl.SGHMC` and `bl.SGNHT`.

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
    return _estimated(each.flatten(), target, _kinetic(bnn, target))


def _kinetic(bnn: Bayesian, target: float) -> Temperature | None:
    values = torch.tensor(bnn.state.get("kinetic_temperatures", ()), dtype=torch.float64)
    return _estimated(values, target) if len(values) > 1 else None


def _estimated(values: Tensor, target: float, kinetic: Temperature | None = None) -> Temperature:
    """Average the estimates of the networks."""
    return Temperature(float(values.mean()), float(values.std()) / len(values) ** 0.5, target, kinetic)
