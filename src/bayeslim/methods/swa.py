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
from bayeslim.methods.shared.averaging import Averaging, averaged
from bayeslim.methods.shared.batch_statistics import measure_again_
from bayeslim.methods.shared.particle_method import ParticleMethod, gathered, snapshot
from bayeslim.methods.shared.refit import restored_on_failure
from bayeslim.results import Fit
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.seeding import seeded


@register("method")
@dataclass(frozen=True, kw_only=True)
class SWA(Averaging, ParticleMethod):
    """The mean of networks along training; settings as in `Averaging`."""

    name: ClassVar[str] = "swa"
    stands_at: ClassVar[Literal["mean", "last"]] = "last"

    def fit(self, bnn: Bayesian, loader: Any, *, epochs: int = 10, seed: int | None = None, **training: Any) -> Fit:
        """Train, average, and measure the batch norms of the mean.

        Args:
            bnn: the network; training starts from where it is.
            loader: batches of inputs and targets.
            epochs: passes over the loader in all.
            seed: makes the run repeatable, and leaves the global random state unchanged.
            **training: options of `bayeslim.train.fit`, except `lr_schedule` and `patience`.
        """
        self.check_fit(bnn, loader, epochs, training)
        with restored_on_failure(bnn):
            result, _ = averaged(self, bnn, loader, None, epochs=epochs, seed=seed, **training)
            with seeded(seed, rank_and_world()[0], loader):
                measure_again_(bnn.model, loader)
        self.keep(bnn, gathered([snapshot(bnn)]))
        return result
