"""Variational families, one file each: the distributions q(w) of `Variational`.

    DiagonalGaussian      independent weights: the mean field
    SparseGaussian        the mean field whose weights are zero once they are mostly noise
    DropoutGaussian       noise in proportion to the weights: Gaussian and variational dropout
    LowRankGaussian       correlated weights: σ² + U Uᵀ
    MixtureOfGaussians    several modes
    ZeroMean              variances alone: weights around zero
    Point                 weights without noise, for gates to scale

A family keeps its own trainable parameters beside the user's: for the parameter `fc.weight`, whose own tensor holds the
mean, the module `fc` also gets `weight_log_std`. So they move, train, shard and save with the layer they belong to, and
the user's names stay.
"""

from bayeslim.families.base import Density, Draw, Family
from bayeslim.families.diagonal import DiagonalGaussian
from bayeslim.families.dropout import DropoutGaussian
from bayeslim.families.lowrank import LowRankGaussian
from bayeslim.families.mixture import MixtureOfGaussians
from bayeslim.families.point import Point
from bayeslim.families.sparse import SparseGaussian
from bayeslim.families.zero_mean import ZeroMean

__all__ = [
    "Density",
    "DiagonalGaussian",
    "Draw",
    "DropoutGaussian",
    "Family",
    "LowRankGaussian",
    "MixtureOfGaussians",
    "Point",
    "SparseGaussian",
    "ZeroMean",
]
