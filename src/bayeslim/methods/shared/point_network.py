"""The base of methods whose weights are a point estimate: one network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.methods.base import Method
from bayeslim.posteriors import Particles
from bayeslim.types import Inputs, call


@dataclass(frozen=True)
class PointNetwork(Method):
    """A method with one network."""

    def posterior(self, bnn: Bayesian) -> Particles:
        """Return the one network as a particle."""
        return Particles({name: bnn.model.get_parameter(name).detach().clone()[None] for name in bnn.sites.names})

    def draw(self, bnn: Bayesian, inputs: Inputs) -> Tensor:
        """Compute the network's outputs, with its noise in training mode."""
        return call(bnn.model, inputs)

    def condition(self, bnn: Bayesian, masks: Mapping[str, Tensor], **options: Any) -> None:
        """Set masked weights of the network to zero."""
        put_zeros(bnn, masks)


def put_zeros(bnn: Bayesian, masks: Mapping[str, Tensor]) -> None:
    """Set the network's own weights to zero wherever a mask is False."""
    with torch.no_grad():
        for name, mask in masks.items():
            weight = bnn.model.get_parameter(name)
            weight.masked_fill_(~mask.to(weight.device), 0)
