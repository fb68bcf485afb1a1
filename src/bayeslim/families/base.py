"""What a family is: settings, and how its parameters stand in a model.

A family can be drawn whole: `density` gives q as it is now, differentiable in its parameters, from which a step takes
its draws and their densities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayeslim.errors import UnsupportedModel
from bayeslim.posteriors import Posterior
from bayeslim.priors import Prior
from bayeslim.sites import owner
from bayeslim.types import Params


@dataclass(frozen=True)
class Draw:
    """One draw of all random parameters.

    Attributes:
        weights: by name, in the precision of the family's own parameters.
        noise: the standard normals it was made of.
        component: which part of a mixture it was drawn from.
    """

    weights: Params
    noise: Params
    component: int | Tensor = 0


class Density(ABC):
    """q(w) at the present parameters. Weights that were cut are zero in every draw and count in no density."""

    log_weights: Tensor
    """Log π of the components, (C,); a single one for a family that is no mixture."""

    @abstractmethod
    def noise(self) -> Params:
        """Standard normals for one draw."""

    @abstractmethod
    def draw(self, noise: Params, component: int | Tensor = 0) -> Draw:
        """The draw that noise stands for, differentiable in the family's parameters."""

    @abstractmethod
    def log_prob(self, draw: Draw) -> Tensor:
        """Log q(w) of a draw, likewise; of the whole mixture, not of the component it was drawn from."""

    def kl(self, priors: Mapping[str, Prior]) -> Tensor | None:
        """KL(q ‖ p) over the weights that are left, where it does not take draws of all weights together."""
        return None


class Family(ABC):
    """The base of all families, frozen dataclasses of settings."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    """What is added to a random parameter's name to name the family's own parameters beside it."""
    at_the_root: ClassVar[tuple[str, ...]] = ()
    """Parameters that the whole model has once."""

    def check(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Refuse a model that already has a parameter or attribute where one of the family's would go."""
        for path in self._paths(names):
            module, leaf = owner(model, path)
            if hasattr(module, leaf):
                raise UnsupportedModel(
                    f'"{path}" already exists in the model: it is Bayesian already, or uses that name. '
                    "Start from the plain network (bnn.mean_network())."
                )

    @abstractmethod
    def register(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Give the random parameters what belongs to them."""

    def strip(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Take out again what `register` put in."""
        for path in self._paths(names):
            module, leaf = owner(model, path)
            delattr(module, leaf)

    @abstractmethod
    def density(self, model: nn.Module, names: tuple[str, ...], masks: Mapping[str, Tensor]) -> Density:
        """Q as it is now, differentiable; `masks` say which weights are left (True)."""

    @abstractmethod
    def posterior(self, model: nn.Module, names: tuple[str, ...]) -> Posterior:
        """Q as it is now, as data: training on does not change it."""

    @abstractmethod
    def assign(self, model: nn.Module, posterior: Posterior, masks: Mapping[str, Tensor]) -> None:
        """Take over a posterior of this family that was conditioned on zeros where a mask is False, in place."""

    def _paths(self, names: tuple[str, ...]) -> list[str]:
        return [name + suffix for name in names for suffix in self.suffixes] + list(self.at_the_root)


def precise_dtype(parameter: Tensor) -> torch.dtype:
    """Half precision cannot hold the σ² of a small σ, so what a family adds stays in single precision there."""
    return torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype


def add_parameter(model: nn.Module, path: str, value: Tensor) -> None:
    """Register a trainable parameter under a path."""
    module, leaf = owner(model, path)
    module.register_parameter(leaf, nn.Parameter(value))


def kept_of(masks: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Which weights of a parameter are left: its mask, or all."""
    mask = masks.get(name)
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask.to(like.device)


def log_prior(priors: Mapping[str, Prior], weights: Params, masks: Mapping[str, Tensor]) -> Tensor:
    """Log p(w) of the weights that are left."""
    values = []
    for name, prior in priors.items():
        if name in masks:
            kept = kept_of(masks, name, weights[name])
            values.append(prior.at(kept).log_prob(weights[name][kept]).sum())
        else:
            values.append(prior.log_prob(weights[name]).sum())
    return torch.stack(values).sum()
