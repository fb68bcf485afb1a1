"""The base of methods with one network and noise at test time, such as dropout or augmented inputs.

The weights are a point estimate. There is no density over them and no variance to prune by; `bl.predict` draws the
noise.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.methods.shared.point_network import PointNetwork
from bayeslim.results import Prediction
from bayeslim.types import Batches, Inputs, call


@dataclass(frozen=True)
class NoisyNetwork(PointNetwork):
    """The base of methods with one network, trained as usual, and noise at test time."""

    def prepared(self, bnn: Bayesian, batches: list[Inputs], local: bool) -> list[Any]:
        """Prepare inputs for all passes; they are the inputs themselves by default."""
        return batches

    @abstractmethod
    def noisy_pass(self, bnn: Bayesian, batches: list[Any], local: bool) -> Tensor:
        """Compute the outputs with one draw of the noise, or one per example."""

    def predictive(
        self, bnn: Bayesian, batches: Batches, samples: int, how: str, generator: torch.Generator | None
    ) -> Prediction | None:
        """Predict from draws of the noise, or with "mean" and "map" without noise."""
        if how not in ("auto", "sample", "local", "mean", "map"):
            return None
        parts = list(batches())
        if how in ("mean", "map"):
            return bnn.likelihood.predict(torch.cat([call(bnn.model, x) for x in parts]).unsqueeze(0))
        prepared = self.prepared(bnn, parts, how == "local")
        passes = [self.noisy_pass(bnn, prepared, how == "local") for _ in range(samples)]
        return bnn.likelihood.predict(torch.stack(passes))
