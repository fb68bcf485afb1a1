"""The base of all posteriors: a distribution over the named parameters of the user's own model.

A posterior is data. Predictions, evidence, pruning plans and bit widths are functions of it. Parameters that it leaves
out are not random: they keep the model's own values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bayeslim.errors import ShapeMismatch, closest
from bayeslim.types import Params


class Posterior(ABC):
    """A distribution over parameters by name."""

    kind: ClassVar[str]
    """The name in saved files."""

    @property
    @abstractmethod
    def mean(self) -> Params:
        """E[w] by name."""

    @property
    @abstractmethod
    def variance(self) -> Params:
        """Marginal variances by name, each of its parameter's shape."""

    @property
    def mode(self) -> Params:
        """The most probable parameters; the mean, unless a family knows better."""
        return self.mean

    @property
    def std(self) -> Params:
        """Marginal standard deviations by name."""
        return {name: variance.sqrt() for name, variance in self.variance.items()}

    @abstractmethod
    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Draw once, or `n` times independently, stacked in front, (n, *shape)."""

    @abstractmethod
    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """Compute log q(w) of one setting of all its parameters, a scalar."""

    @abstractmethod
    def condition(self, masks: Mapping[str, Tensor]) -> Posterior:
        """Condition on w = 0 wherever a mask is False (pruning is conditioning)."""

    @abstractmethod
    def tensors(self) -> Params:
        """Collect all its state as named tensors, for saving."""

    @classmethod
    @abstractmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Build it again from `config()` and `tensors()`."""

    def config(self) -> dict[str, Any]:
        """Describe the JSON settings that `restore` needs beside the tensors."""
        return {}

    def to(self, device: torch.device) -> Self:
        """Move it to a device; return itself if it is there already."""
        own = self.tensors()
        if all(tensor.device == device for tensor in own.values()):
            return self
        return self.restore(self.config(), {name: tensor.to(device) for name, tensor in own.items()})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(self.mean)

    @property
    def num_parameters(self) -> int:
        """The number of random scalar parameters."""
        return sum(t.numel() for t in self.mean.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__} posterior over {self.num_parameters:,} weights in {len(self.names)} parameters"


def like_means(values: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> Params:
    """Convert moments to the dtypes of the means, but to float32 for half precision."""
    return {name: value.to(torch.promote_types(mean[name].dtype, torch.float32)) for name, value in values.items()}


def keyed(**groups: Mapping[str, Tensor]) -> Params:
    """Join groups of named tensors for saving, under the keys `group:name`.

    >>> keyed(mean={"w": torch.ones(1)})
    {'mean:w': tensor([1.])}
    """
    found = {f"{group}:{name}": tensor for group, values in groups.items() for name, tensor in values.items()}
    return {key: tensor.detach().contiguous() for key, tensor in found.items()}


def unkeyed(tensors: Mapping[str, Tensor], group: str, separator: str = ":") -> Params:
    """Take a group of named tensors out of what `keyed` joined."""
    start = f"{group}{separator}"
    return {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}


def check_masks(masks: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> Params:
    """Check masks against a posterior's parameters; those without one are kept whole.

    Returns:
        a boolean mask for every parameter in `mean`, True = kept, on the parameter's device.
    """
    for name, mask in masks.items():
        if name not in mean:
            raise ShapeMismatch(
                f'The mask of "{name}" belongs to no parameter of this posterior. '
                f"Closest names: {closest(name, mean) or ', '.join(list(mean)[:3])}."
            )
        if mask.shape != mean[name].shape:
            raise ShapeMismatch(
                f'The mask of "{name}" must have its shape {tuple(mean[name].shape)}. Got {tuple(mask.shape)}.'
            )
    return {
        name: masks[name].to(device=value.device, dtype=torch.bool)
        if name in masks
        else torch.ones_like(value, dtype=torch.bool)
        for name, value in mean.items()
    }
