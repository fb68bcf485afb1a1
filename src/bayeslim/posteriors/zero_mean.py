"""Independent Gaussians around zero: q(w) = Π N(wᵢ | 0, σᵢ²), the posterior of a variance network."""

from __future__ import annotations

from typing import ClassVar

from bayeslim.io.registry import register
from bayeslim.posteriors.diagonal import Diagonal


@register("posterior")
class ZeroMeanDiagonal(Diagonal):
    """A factorised Gaussian whose means are all zero by design: the spreads carry the information.

    It is a type of its own, so that criteria which read the signal in the means can refuse it.
    """

    kind: ClassVar[str] = "zero_mean"
