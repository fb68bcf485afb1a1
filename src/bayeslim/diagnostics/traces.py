"""Traces of particles, (chains, draws, ...), in weight and in function space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, ShapeMismatch
from bayeslim.posteriors import Particles
from bayeslim.predict.predict import predict
from bayeslim.types import Inputs, Params


def particles_of(source: Bayesian | Particles) -> Particles:
    """Return the particles of a network, or the given ones."""
    if not isinstance(source, (Bayesian, Particles)):
        raise TypeError(f"Diagnostics need a Bayesian network or Particles. Got {type(source).__name__}.")
    posterior = source.posterior_ if isinstance(source, Bayesian) else source
    if not isinstance(posterior, Particles):
        raise BayeslimError(
            f"Diagnostics need chains of networks. Got a {type(posterior).__name__} posterior. "
            "Use a sampler, such as bl.SGLD(...) or bl.HMC(...)."
        )
    return posterior


def in_chains(values: Tensor, chains: int) -> Tensor:
    """Reshape (S, ...) to (chains, draws, ...)."""
    if chains < 1 or len(values) % chains:
        raise ShapeMismatch(f"{len(values)} networks do not come from {chains} equally long chains.")
    return values.reshape(chains, -1, *values.shape[1:])


def weights(particles: Particles, chains: int) -> Params:
    """Return traces of the weights, by name."""
    return {name: in_chains(value.detach(), chains) for name, value in particles.values.items()}


def outputs(source: Bayesian | Particles, x: Inputs, chains: int) -> Tensor:
    """Compute traces of predicted means for inputs, (chains, draws, B, ...)."""
    if not isinstance(source, Bayesian):
        raise TypeError("Particles alone cannot predict: pass the Bayesian network with x.")
    draws = predict(source, x, samples=particles_of(source).count).samples
    with torch.no_grad():
        means = torch.stack([source.likelihood.predict(draw.unsqueeze(0)).mean for draw in draws])
    return in_chains(means, chains)


def energies(energy: Tensor | Sequence[Any], chains: int, draws: int) -> Tensor:
    """Check and reshape the energies of every draw, (chains, draws)."""
    found = torch.as_tensor(energy, dtype=torch.float64)
    if found.shape == (chains * draws,):
        found = in_chains(found, chains)
    if found.shape != (chains, draws):
        raise ShapeMismatch(f"Energies must be ({chains}, {draws}), chains and draws. Got {tuple(found.shape)}.")
    return found
