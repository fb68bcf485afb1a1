"""The weights of one parameter to round: its non-zeros, with their posterior precisions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Weights:
    """The m non-zero weights of a parameter, in flat order.

    Attributes:
        values: (m,), float64.
        precision: of each, (m,).
        places: their flat indices in the parameter, (m,).
        unit: the index of each one's unit (first dimension), (m,); all 0 where a parameter has one grid.
        units: the number of grids of the parameter.
        shape: of the parameter.
    """

    values: Tensor
    precision: Tensor
    places: Tensor
    unit: Tensor
    units: int
    shape: torch.Size

    @classmethod
    def of(cls, value: Tensor, precision: Tensor, kept: Tensor, by_unit: bool) -> Weights:
        """Collect the kept weights of a parameter; `by_unit` gives each slice a grid."""
        places = kept.flatten().nonzero()[:, 0]
        units = value.shape[0] if by_unit and value.ndim > 1 else 1
        unit = places // max(1, value.numel() // units)
        return cls(
            value.detach().flatten()[places].double(),
            precision.expand(value.shape).flatten()[places].double(),
            places,
            unit,
            units,
            value.shape,
        )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def zeros(self) -> int:
        """Number of weights of the parameter that are not kept."""
        return self.shape.numel() - len(self.values)

    @property
    def counts(self) -> Tensor:
        """Number of kept weights of each unit, (units,)."""
        return torch.bincount(self.unit, minlength=self.units)

    def totals(self, each: Tensor) -> Tensor:
        """Sum over the weights of each unit, (units,)."""
        return torch.zeros(self.units, dtype=each.dtype, device=each.device).index_add_(0, self.unit, each)

    def loss(self, rounded: Tensor) -> Tensor:
        """Compute ½ Σ p δ² of each unit, (units,), in nats, with δ from rounding."""
        return self.totals(0.5 * self.precision * (self.values - rounded).square())

    def thinned(self, most: int) -> Weights:
        """Take an evenly spaced sample of about `most` weights."""
        stride = max(1, len(self) // max(most, 256 * self.units))
        if stride == 1:
            return self
        values, precision, places, unit = (t[::stride] for t in (self.values, self.precision, self.places, self.unit))
        return Weights(values, precision, places, unit, self.units, self.shape)

    def whole(self, codes: Tensor) -> Tensor:
        """Scatter codes into the parameter's shape, with zeros elsewhere."""
        flat = codes.new_zeros(self.shape.numel())
        flat[self.places] = codes
        return flat.reshape(self.shape)

    def per_unit(self, values: Tensor) -> Tensor:
        """Reshape values (units,) to broadcast to the parameter; one is a scalar."""
        return values[0] if self.units == 1 else values.reshape(-1, *[1] * (len(self.shape) - 1))
