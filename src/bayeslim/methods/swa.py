"""Stochastic weight averaging: one network, the mean of networks along training.

    θ_SWA = (1/T) Σ_i θ_i

Training at a high rate moves around the edge of a wide optimum; the mean lies inside and generalises better. It is a
point estimate without uncertainty; `SWAG` also estimates the variance. Batch norms are measured again for the mean.

Izmailov, Podoprikhin, Garipov, Vetrov & Wilson 2018, arXiv:1803.05407
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from bayeslim.bayesian import Bayesian
from bayeslim.io.registry import register
from bayeslim.methods.shared.averaging import Averaging
from bayeslim.methods.shared.batch_statistics import measure_again_
from bayeslim.methods.shared.particle_method import ParticleMethod, gathered, snapshot
from bayeslim.methods.shared.trajectory import Trajectory
from bayeslim.posteriors import Posterior


@register("method")
@dataclass(frozen=True, kw_only=True)
class SWA(Averaging, ParticleMethod):
    """The mean of networks along training; settings as in `Averaging`."""

    name: ClassVar[str] = "swa"
    stands_at: ClassVar[Literal["mean", "last"]] = "last"

    def found(self, bnn: Bayesian, trajectory: Trajectory, loader: Any) -> dict[str, Posterior]:
        """Measure batch norms for the mean, and take it as the one particle."""
        measure_again_(bnn.model, loader)
        return {"posterior": gathered([snapshot(bnn)])}
