"""Named parameters as one long vector, and back; leading dimensions stay in front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslim.types import Params


@dataclass(frozen=True)
class FlatLayout:
    """The order and shapes of the parameters in a vector.

    Attributes:
        shapes: by name, in order.
    """

    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> FlatLayout:
        """Take the layout of parameters, in their order."""
        return cls({name: value.shape for name, value in params.items()})

    @property
    def size(self) -> int:
        """The vector's length."""
        return sum(shape.numel() for shape in self.shapes.values())

    def vector(self, params: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Lay parameters end to end, (..., D), in the dtype and on the device of `like`."""
        parts = []
        for name, shape in self.shapes.items():
            value = params[name]
            parts.append(value.reshape(*value.shape[: value.ndim - len(shape)], -1).to(like))
        return torch.cat(parts, -1)

    def params(self, vector: Tensor) -> Params:
        """Split a vector (..., D) into parameters by name."""
        parts = vector.split([shape.numel() for shape in self.shapes.values()], -1)
        return {
            name: part.reshape((*vector.shape[:-1], *shape))
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
