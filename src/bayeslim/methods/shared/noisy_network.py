"""What methods share whose draws are one network's, disturbed: by what it drops, or by what is done to its inputs.

The weights are a point, trained as ever. What is random lies beside them, so there is no density over weights and no
spread of theirs to prune by; `bl.predict` draws the noise.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayeslim.methods.shared.point_network import PointNetwork
from bayeslim.results import Prediction
from bayeslim.types import Batches, Inputs, call

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


@dataclass(frozen=True)
class NoisyNetwork(PointNetwork):
    """The base of methods with one network and noise in its use; it is trained by plain gradient descent."""

    @abstractmethod
    def noisy_pass(self, bnn: Bayesian, batches: list[Inputs], local: bool) -> Tensor:
        """The outputs for all inputs with one draw of the noise, or with `local` one for every example."""

    def predictive(
        self, bnn: Bayesian, batches: Batches, samples: int, how: str, generator: torch.Generator | None
    ) -> Prediction | None:
        """From draws of the noise; by "mean" and "map" without any."""
        if how not in ("auto", "sample", "local", "mean", "map"):
            return None
        parts = list(batches())
        if how in ("mean", "map"):
            return bnn.likelihood.predict(torch.cat([call(bnn.model, x) for x in parts]).unsqueeze(0))
        passes = [self.noisy_pass(bnn, parts, how == "local") for _ in range(samples)]
        return bnn.likelihood.predict(torch.stack(passes))
