"""Methods: ways to a posterior, one file each."""

from bayeslim.methods.base import Method, Terms
from bayeslim.methods.deep_ensemble import DeepEnsemble
from bayeslim.methods.hmc import HMC
from bayeslim.methods.ivon import IVON
from bayeslim.methods.laplace import Laplace
from bayeslim.methods.mc_augmentation import MCAugmentation
from bayeslim.methods.mc_batch_norm import MCBatchNorm
from bayeslim.methods.mc_dropout import MCDropout
from bayeslim.methods.multi_swag import MultiSWAG
from bayeslim.methods.psgld import PSGLD
from bayeslim.methods.sghmc import SGHMC
from bayeslim.methods.sgld import SGLD
from bayeslim.methods.sgnht import SGNHT
from bayeslim.methods.snapshot import Snapshot
from bayeslim.methods.student import Student
from bayeslim.methods.subnetwork import Subnetwork
from bayeslim.methods.subspace import Subspace
from bayeslim.methods.svgd import SVGD
from bayeslim.methods.swa import SWA
from bayeslim.methods.swag import SWAG
from bayeslim.methods.variational import Variational

__all__ = [
    "HMC",
    "IVON",
    "PSGLD",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "SVGD",
    "SWA",
    "SWAG",
    "DeepEnsemble",
    "Laplace",
    "MCAugmentation",
    "MCBatchNorm",
    "MCDropout",
    "Method",
    "MultiSWAG",
    "Snapshot",
    "Student",
    "Subnetwork",
    "Subspace",
    "Terms",
    "Variational",
]
