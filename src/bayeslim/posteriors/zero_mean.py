"""Independent Gaussians around zero: q(w) = Π N(wᵢ | 0, σᵢ²), the posterior of a variance network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from bayeslim.io.registry import register
from bayeslim.posteriors.diagonal import Diagonal


@register("posterior")
class ZeroMeanDiagonal(Diagonal):
    """A factorised Gaussian whose means are all zero by design: the spreads carry the information.

    It is a type of its own, so that criteria which read the signal in the means can refuse it.
    """

    kind: ClassVar[str] = "zero_mean"

    def condition(self, masks: Mapping[str, Tensor]) -> ZeroMeanDiagonal:
        """Set the spread to zero where a mask is False; the rest stays."""
        rest = super().condition(masks)
        return ZeroMeanDiagonal(rest.mean, rest.std)
