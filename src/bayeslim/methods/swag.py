"""SWAG: a Gaussian with the mean and covariance of networks along training.

    θ = θ_SWA + √s Σ_diag^½ z₁ + √(s / (K − 1)) D z₂        z₁ ~ N(0, I),  z₂ ~ N(0, I_K),  s = ½

with the moments of `shared/trajectory.py`: a covariance s (Σ_diag + D Dᵀ / (K − 1)), low-rank plus diagonal.

Batch norms need statistics for the weights of their network. Those of the mean network are measured at the end of
training. For a network with batch norms, `samples` networks are then drawn and measured too, and predictions use these:
drawing others would need the training data. After pruning, until the next `fit`, all draws have the statistics of the
mean network.

Maddox, Garipov, Izmailov, Vetrov & Wilson 2019, arXiv:1902.02476
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.io.registry import register
from bayeslim.methods.shared.averaging import GaussianAveraging
from bayeslim.methods.shared.batch_norms import norms_of
from bayeslim.methods.shared.batch_statistics import drawn, measure_again_
from bayeslim.methods.shared.found_posterior import FoundPosterior
from bayeslim.methods.shared.trajectory import Trajectory
from bayeslim.posteriors import Posterior
from bayeslim.predict.predict import predictive
from bayeslim.results import Prediction
from bayeslim.types import Batches, call


@register("method")
@dataclass(frozen=True, kw_only=True)
class SWAG(GaussianAveraging, FoundPosterior):
    """A Gaussian of networks along training; settings as in `GaussianAveraging`.

    The posterior is a `LowRankCovariance`, or with `rank=0` a `Diagonal`. The network itself is set to the mean.
    """

    name: ClassVar[str] = "swag"
    missing: ClassVar[str] = "The posterior of swag is gathered in training: call bnn.fit(loader, ...) first."

    def found(self, bnn: Bayesian, trajectory: Trajectory, loader: Any) -> dict[str, Posterior]:
        """Build the posterior at its mean, and measure batch norms for it and its draws."""
        posterior = trajectory.gaussian(self.scale)
        measure_again_(bnn.model, loader)
        networks = {"networks": drawn(bnn, posterior, loader, self.samples)} if norms_of(bnn.model) else {}
        return {"posterior": posterior, **networks}

    def condition(self, bnn: Bayesian, masks: Mapping[str, Tensor], **options: Any) -> None:
        """Condition the Gaussian on zeros."""
        super().condition(bnn, masks, **options)
        bnn.state.pop("networks", None)  # drawn from the posterior before conditioning

    def predictive(
        self, bnn: Bayesian, batches: Batches, samples: int, how: str, generator: torch.Generator | None
    ) -> Prediction | None:
        """Predict with the measured networks; before `fit` with the one network."""
        if how == "local":
            raise ValueError('how="local" needs noise per example, and SWAG has none. Use how="sample".')
        networks = bnn.state.get("networks")
        if networks is not None and how in ("auto", "sample"):
            return bnn.likelihood.predict(predictive(networks, bnn, batches, samples, how, generator))
        if how not in ("mean", "map") or "posterior" in bnn.state:
            return None
        return bnn.likelihood.predict(torch.cat([call(bnn.model, x) for x in batches()]).unsqueeze(0))
