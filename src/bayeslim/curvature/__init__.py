"""Curvature of a trained network: Kronecker factors, diagonals, dense and low-rank matrices, Jacobians.

Everything here is one pass (or a few) over the data that leaves the model as it was found, and sums over all data the
curvature of −Σ log p(y|f) in the parameters, without any prior.
"""

from __future__ import annotations

from bayeslim.curvature.diag import diag
from bayeslim.curvature.ekfac import ekfac
from bayeslim.curvature.factors import Factors, LayerFactors
from bayeslim.curvature.ggn import DenseCurvature, ggn
from bayeslim.curvature.jacobian import jacobian, jacobians
from bayeslim.curvature.kfac import kfac
from bayeslim.curvature.kfra import kfra
from bayeslim.curvature.lowrank import LowRankCurvature, lowrank

__all__ = [
    "DenseCurvature",
    "Factors",
    "LayerFactors",
    "LowRankCurvature",
    "diag",
    "ekfac",
    "ggn",
    "jacobian",
    "jacobians",
    "kfac",
    "kfra",
    "lowrank",
]
