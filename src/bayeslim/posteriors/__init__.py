"""Posteriors: distributions over the named parameters of a model, one file each."""

from bayeslim.posteriors.base import Posterior, check_masks
from bayeslim.posteriors.dense import Dense
from bayeslim.posteriors.diagonal import Diagonal
from bayeslim.posteriors.gated import Gated, Scales
from bayeslim.posteriors.gaussian import Conditioned, Gaussian
from bayeslim.posteriors.kronecker import Kronecker
from bayeslim.posteriors.kronecker_block import KroneckerFactors
from bayeslim.posteriors.lowrank import LowRank
from bayeslim.posteriors.lowrank_covariance import LowRankCovariance
from bayeslim.posteriors.mixture import Mixture
from bayeslim.posteriors.particles import Particles
from bayeslim.posteriors.saliency import group_saliency, saliency, slice_indices
from bayeslim.posteriors.zero_mean import ZeroMeanDiagonal

__all__ = [
    "Conditioned",
    "Dense",
    "Diagonal",
    "Gated",
    "Gaussian",
    "Kronecker",
    "KroneckerFactors",
    "LowRank",
    "LowRankCovariance",
    "Mixture",
    "Particles",
    "Posterior",
    "Scales",
    "ZeroMeanDiagonal",
    "check_masks",
    "group_saliency",
    "saliency",
    "slice_indices",
]
