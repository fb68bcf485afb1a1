"""The mean field of Sparse Variational Dropout: weights that are noise are zero.

    q(w) = N(w | μ [log α ≤ t], σ²),      α = σ² / μ²

With `priors.LogUniform` many weights end at log α ≫ 1, where the mean carries no information. Such means count as zero
during training, from the moment they pass the threshold, so that the other weights learn to do without them. Setting
them to zero only after training would harm the network. μ and σ are trained as they are (additive noise), so no
gradient grows with α, and a weight whose noise shrinks again comes back.

Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369 · Gale, Elsen & Hooker 2019, arXiv:1902.09574
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from bayeslim.errors import MAY_BE_INFINITE
from bayeslim.families.diagonal import DiagonalGaussian
from bayeslim.io.registry import register


@register("family")
@dataclass(frozen=True)
class SparseGaussian(DiagonalGaussian):
    """Independent Gaussians whose mean counts as zero where log α > `zero_above`.

    Attributes:
        initial_std: the initial σ of every weight.
        zero_above: the largest log α of a weight that counts; 3 keeps those with a drop probability below 0.95.
    """

    initial_std: float = math.exp(-5)
    zero_above: float = field(default=3.0, metadata=MAY_BE_INFINITE)
    name: ClassVar[str] = "sparse"
    counts_otherwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.zero_above > -math.inf:
            raise ValueError(f"zero_above is the largest log α of a weight that counts. Got {self.zero_above}.")

    def counted(self, mean: Tensor, log_std: Tensor) -> Tensor:
        """Return μ, or zero where σ > |μ| exp(t/2)."""
        kept = mean.detach().abs().log() >= log_std.detach() - self.zero_above / 2
        return mean * kept
