"""Variational families: the distributions q(w) that `Variational` fits, one file each.

    DiagonalGaussian      independent weights: the mean field
    SparseGaussian        the mean field whose weights are zero once they are mostly noise
    LowRankGaussian       correlated weights: σ² + U Uᵀ
    MixtureOfGaussians    several modes

A family keeps its own trainable parameters beside the user's: for the parameter `fc.weight`, whose own tensor holds the
mean, the module `fc` also gets `weight_log_std`. So they move, train, shard and save with the layer they belong to, and
the user's names stay.
"""

from bayeslim.families.base import Density, Draw, Family
from bayeslim.families.diagonal import DiagonalGaussian
from bayeslim.families.lowrank import LowRankGaussian
from bayeslim.families.mixture import MixtureOfGaussians
from bayeslim.families.sparse import SparseGaussian

FAMILIES: dict[str, type[Family]] = {
    c.name: c for c in (DiagonalGaussian, SparseGaussian, LowRankGaussian, MixtureOfGaussians)
}
"""Families by the name they are saved under; a new one is added here."""

__all__ = [
    "FAMILIES",
    "Density",
    "DiagonalGaussian",
    "Draw",
    "Family",
    "LowRankGaussian",
    "MixtureOfGaussians",
    "SparseGaussian",
]
