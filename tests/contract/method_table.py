"""Every method, one line each: whatever stands here is run through every promise."""

from __future__ import annotations

from collections.abc import Callable

import bayeslim as bl
from bayeslim import gates

METHODS: dict[str, Callable[[], bl.Method]] = {
    "variational-local": lambda: bl.Variational(estimator="local"),
    "variational-shared": lambda: bl.Variational(estimator="shared"),
    "variational-flipout": lambda: bl.Variational(estimator="flipout"),
    "variational-antithetic": lambda: bl.Variational(samples=2, antithetic=True),
    "variational-dropout": lambda: bl.Variational(bl.families.DropoutGaussian(0.2, per="unit", largest=1.0)),
    "gaussian-dropout": lambda: bl.Variational(bl.families.DropoutGaussian(0.2, learn=False)),
    "variance-network": lambda: bl.Variational(bl.families.ZeroMean()),
    "variational-lowrank": lambda: bl.Variational(bl.families.LowRankGaussian(rank=2)),
    "variational-mixture": lambda: bl.Variational(bl.families.MixtureOfGaussians(components=2)),
    "variational-renyi": lambda: bl.Variational(renyi=0.5, samples=2),
    "variational-gates": lambda: bl.Variational(gates=gates.HalfCauchy()),
    "variational-gates-points": lambda: bl.Variational(bl.families.Point(), gates=gates.HardConcrete()),
    "variational-gates-shared": lambda: bl.Variational(
        bl.families.SparseGaussian(), gates=gates.NormalJeffreys(), estimator="shared"
    ),
    "laplace-kron": lambda: bl.Laplace(),
    "laplace-diag": lambda: bl.Laplace("diag"),
    "deep-ensemble": lambda: bl.DeepEnsemble(members=2),
    "deep-ensemble-adversarial": lambda: bl.DeepEnsemble(members=2, adversarial=0.05),
    "snapshot": lambda: bl.Snapshot(cycles=1),
    "sgld": lambda: bl.SGLD(samples=2),
    "psgld": lambda: bl.PSGLD(samples=2),
    "sghmc": lambda: bl.SGHMC(samples=2, adapt=True),
    "sgnht": lambda: bl.SGNHT(samples=2),
    "hmc": lambda: bl.HMC(samples=2, warmup=1, leapfrog=2),
    "subspace": lambda: bl.Subspace(rank=1, snapshots=2, inner=bl.HMC(2, 1, 2)),
    "subspace-laplace": lambda: bl.Subspace(rank=1, snapshots=2, inner=bl.Laplace(), draws=2),
    "swa": lambda: bl.SWA(),
    "swag": lambda: bl.SWAG(start=0.0, every=1, samples=2),
    "swag-diagonal": lambda: bl.SWAG(rank=0, start=0.0, every=1, samples=2),
    "multi-swag": lambda: bl.MultiSWAG(members=2, samples=2, start=0.0, every=1),
    "mc-dropout": lambda: bl.MCDropout(),
    "mc-batch-norm": lambda: bl.MCBatchNorm(samples=2),
    "mc-augmentation": lambda: bl.MCAugmentation(noise=0.1),
    "svgd": lambda: bl.SVGD(particles=2),
    "svgd-functions": lambda: bl.SVGD(particles=2, function_space=True),
    "ivon": lambda: bl.IVON(),
}

A_THIRD = (
    "variational-local", "variational-flipout", "variational-lowrank", "variational-renyi", "variational-gates",
    "laplace-kron", "deep-ensemble", "sghmc", "swag", "svgd", "ivon",
)  # fmt: skip
"""One method of each kind of loss, for promises that are slow to check."""
