from bayeslim import (
    continual,
    diagnostics,
    errors,
    families,
    gates,
    likelihoods,
    metrics,
    posteriors,
    priors,
    recipes,
    samplers,
)
from bayeslim.app import data, zoo
from bayeslim.app.benchmark import Benchmark, benchmark
from bayeslim.app.compress import Compressed, compress
from bayeslim.app.report import report
from bayeslim.bayesian import Bayesian, bayesianize, bayesianize_
from bayeslim.coding.encode import Encoded, decode, encode
from bayeslim.decide.acquire import acquire, learn_actively
from bayeslim.decide.alarms import alarms
from bayeslim.decide.attacks import fgsm, pgd
from bayeslim.decide.calibrate import calibrate
from bayeslim.decide.conformal import conformal
from bayeslim.decide.selective import selective
from bayeslim.distill.distill import distill
from bayeslim.evidence.log_evidence import log_evidence
from bayeslim.export import export
from bayeslim.export.c.library import load_c
from bayeslim.io.registry import register
from bayeslim.io.saving import load, save
from bayeslim.methods.base import Method
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
from bayeslim.methods.shared.fit_together import fit_together
from bayeslim.methods.snapshot import Snapshot
from bayeslim.methods.subnetwork import Subnetwork
from bayeslim.methods.subspace import Subspace
from bayeslim.methods.svgd import SVGD
from bayeslim.methods.swa import SWA
from bayeslim.methods.swag import SWAG
from bayeslim.methods.variational import Variational
from bayeslim.predict.compiled import Compiled, compiled
from bayeslim.predict.predict import predict
from bayeslim.prune import (
    Budget,
    Plan,
    PrunedBlocks,
    align,
    compact,
    fine_tune,
    plan,
    prune,
    prune_blocks,
    prune_blocks_,
)
from bayeslim.quantise.deserved import deserved_bits
from bayeslim.quantise.quantise import quantise
from bayeslim.quantise.result import Quantised
from bayeslim.results import Evidence, Fit, Prediction
from bayeslim.sites import sites
from bayeslim.stochastic import linear_in_parameters
from bayeslim.train import schedules
from bayeslim.version import __version__ as __version__

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
    "Bayesian",
    "Benchmark",
    "Budget",
    "Compiled",
    "Compressed",
    "DeepEnsemble",
    "Encoded",
    "Evidence",
    "Fit",
    "Laplace",
    "MCAugmentation",
    "MCBatchNorm",
    "MCDropout",
    "Method",
    "MultiSWAG",
    "Plan",
    "Prediction",
    "PrunedBlocks",
    "Quantised",
    "Snapshot",
    "Subnetwork",
    "Subspace",
    "Variational",
    "acquire",
    "alarms",
    "align",
    "bayesianize",
    "bayesianize_",
    "benchmark",
    "calibrate",
    "compact",
    "compiled",
    "compress",
    "conformal",
    "continual",
    "data",
    "decode",
    "deserved_bits",
    "diagnostics",
    "distill",
    "encode",
    "errors",
    "export",
    "families",
    "fgsm",
    "fine_tune",
    "fit_together",
    "gates",
    "learn_actively",
    "likelihoods",
    "linear_in_parameters",
    "load",
    "load_c",
    "log_evidence",
    "metrics",
    "pgd",
    "plan",
    "posteriors",
    "predict",
    "priors",
    "prune",
    "prune_blocks",
    "prune_blocks_",
    "quantise",
    "recipes",
    "register",
    "report",
    "samplers",
    "save",
    "schedules",
    "selective",
    "sites",
    "zoo",
]
