"""The base of all families: settings, and the parameters that they add to a model.

`density` builds q at the present parameters. It is differentiable in them, and gives a training step its draws and
their densities.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayeslim.errors import UnsupportedModel, check_settings
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
        component: the index of the mixture component that it was drawn from.
    """

    weights: Params
    noise: Params
    component: int | Tensor = 0


class Density(ABC):
    """The density q(w) at the present parameters.

    Cut weights are zero in every draw and do not count in densities.
    """

    log_weights: Tensor
    """Log π of the components, (C,); a single one for a family that is no mixture."""

    @abstractmethod
    def noise(self) -> Params:
        """Draw the standard normals of one draw."""

    @abstractmethod
    def draw(self, noise: Params, component: int | Tensor = 0) -> Draw:
        """Turn noise into a draw, differentiable in the family's parameters."""

    @abstractmethod
    def log_prob(self, draw: Draw) -> Tensor:
        """Compute log q(w) of a draw under the whole mixture, differentiable."""

    def kl(self, priors: Mapping[str, Prior]) -> Tensor | None:
        """Compute KL(q ‖ p) over the kept weights; None where that needs full draws."""
        return None


class Family(ABC):
    """The base of all families, frozen dataclasses of settings."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    """The suffixes that turn a random parameter's name into those of the family's own parameters."""
    at_the_root: ClassVar[tuple[str, ...]] = ()
    """The names of parameters that the model has once."""

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def numbers_per_weight(self) -> int:
        """The number of scalars that the family adds for every random weight, at least."""
        return 0

    def check(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Raise an `UnsupportedModel` if a name that the family needs is taken."""
        # a family that freezes the model's own parameters leaves only its spreads to be found again
        spreads = [name for name in names if any(suffix and name.endswith(suffix) for suffix in self.suffixes)]
        for path in spreads + self._paths(names):
            module, leaf = owner(model, path)
            if hasattr(module, leaf):
                raise UnsupportedModel(
                    f'"{path}" already exists in the model: it is Bayesian already, or uses that name. '
                    "Start from the plain network (bnn.mean_network())."
                )

    @abstractmethod
    def register(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Add the family's parameters to the model."""

    def strip(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Remove the family's parameters from the model."""
        for path in self._paths(names):
            module, leaf = owner(model, path)
            delattr(module, leaf)

    @abstractmethod
    def density(self, model: nn.Module, names: tuple[str, ...], masks: Mapping[str, Tensor]) -> Density:
        """Build q at the present parameters, differentiable; a mask is True where kept."""

    @abstractmethod
    def posterior(self, model: nn.Module, names: tuple[str, ...]) -> Posterior:
        """Build the posterior at the present parameters, as a copy of the data."""

    def assign(self, model: nn.Module, posterior: Posterior, masks: Mapping[str, Tensor]) -> None:
        """Set the parameters to a posterior conditioned on zeros where a mask is False."""
        with torch.no_grad():
            for name, value in posterior.mean.items():
                model.get_parameter(name).copy_(value)
                if name in masks and "_log_std" in self.suffixes:
                    model.get_parameter(f"{name}_log_std").masked_fill_(~masks[name], -math.inf)

    def _paths(self, names: tuple[str, ...]) -> list[str]:
        return [name + suffix for name in names for suffix in self.suffixes] + list(self.at_the_root)


def precise_dtype(parameter: Tensor) -> torch.dtype:
    """Choose the dtype of the family's parameters: small variances need float32."""
    return torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype


def add_parameter(model: nn.Module, path: str, value: Tensor) -> None:
    """Register a trainable parameter under a path."""
    module, leaf = owner(model, path)
    module.register_parameter(leaf, nn.Parameter(value))


def kept_of(masks: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Return the mask of a parameter's kept weights."""
    mask = masks.get(name)
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask.to(like.device)


def masked(tensors: Params, masks: Mapping[str, Tensor]) -> Params:
    """Set the cut entries of tensors to zero."""
    return {name: value * masks[name] if name in masks else value for name, value in tensors.items()}


def without_cut(log_stds: Params, masks: Mapping[str, Tensor]) -> tuple[Params, Params]:
    """Return log σ for the algebra, and σ for draws; both are 0 where cut."""
    logs = {n: t.masked_fill(~masks[n], 0.0) if n in masks else t for n, t in log_stds.items()}
    return logs, masked({name: value.exp() for name, value in logs.items()}, masks)


def count_kept(weights: Params, masks: Mapping[str, Tensor]) -> int | Tensor:
    """Count the weights that are left."""
    return sum(masks[n].sum(dtype=t.dtype) if n in masks else t.numel() for n, t in weights.items())


def log_prior(priors: Mapping[str, Prior], weights: Params, masks: Mapping[str, Tensor]) -> Tensor:
    """Compute log p(w) of the kept weights."""
    values = []
    for name, prior in priors.items():
        if name in masks:
            kept = kept_of(masks, name, weights[name])
            values.append(prior.at(kept).log_density([weights[name][kept]]))
        else:
            values.append(prior.log_density([weights[name]]))
    return torch.stack(values).sum()
