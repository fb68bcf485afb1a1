"""The weights of one parameter that are to be rounded: those that are not zero, with how sharply each is known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Weights:
    """The kept weights of a parameter, m of them, in their flat order.

    Attributes:
        values: (m,), float64.
        precision: of each, (m,).
        places: their flat places in the parameter, (m,).
        unit: which unit (first dimension) each belongs to, (m,); all 0 where a parameter has one grid.
        units: how many grids the parameter has.
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
        """Take a parameter apart; `by_unit` for a grid for every slice of the first dimension."""
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
        """How many weights of the parameter are not among them."""
        return self.shape.numel() - len(self.values)

    @property
    def counts(self) -> Tensor:
        """How many of them each unit has, (units,)."""
        return torch.bincount(self.unit, minlength=self.units)

    def totals(self, each: Tensor) -> Tensor:
        """Sums over the weights of each unit, (units,)."""
        return torch.zeros(self.units, dtype=each.dtype, device=each.device).index_add_(0, self.unit, each)

    def loss(self, rounded: Tensor) -> Tensor:
        """½ Σ p δ² of each unit in nats, (units,), where weights are rounded to these levels."""
        return self.totals(0.5 * self.precision * (self.values - rounded).square())

    def thinned(self, most: int) -> Weights:
        """Evenly spread weights of them, for searches that need not see all."""
        stride = max(1, len(self) // max(most, 256 * self.units))
        if stride == 1:
            return self
        values, precision, places, unit = (t[::stride] for t in (self.values, self.precision, self.places, self.unit))
        return Weights(values, precision, places, unit, self.units, self.shape)

    def whole(self, codes: Tensor) -> Tensor:
        """Codes of the parameter's shape: zero where nothing was kept."""
        flat = codes.new_zeros(self.shape.numel())
        flat[self.places] = codes
        return flat.reshape(self.shape)

    def per_unit(self, values: Tensor) -> Tensor:
        """Values of the units (units,) so that they broadcast to the parameter; a scalar for one grid."""
        return values[0] if self.units == 1 else values.reshape(-1, *[1] * (len(self.shape) - 1))
