"""Scales under the normal-Jeffreys prior p(z) ∝ 1/|z|, which is flat in log |z|.

With w | z ~ N(0, z²) the prior of a weight is log-uniform; here all weights of a group share their z.

Non-centred, z multiplies the weights, w = z w̃, and is Gaussian:

    q(z) = N(μ, σ²),      KL(q ‖ p) = F(|μ| / √2 σ),      α = σ²/μ²

F is the divergence of variational dropout, exact and vanishing as α → ∞ (`priors.LogUniform`). A group goes where log α
is large; the paper reads the threshold off a histogram of log α, which has two humps.

Centred, z is the scale of the weights' prior (`centred.py`), which needs a log-normal z:

    log z ~ N(m, v),      KL(q ‖ p) = −½ log 2πe v

up to the constant that an improper prior leaves open. For n weights whose E w² sums to S the best q(z) has v = 1/2n and
e^(2m − 2v) = S/n. They then cost, but for a constant, ½ Σ log(S / n σ²) with σ² the variance of each: a group is
free once its weights are pure noise of equal size, however large. So the likelihood alone makes them
small, and a group goes where the log of the mode of z, m − v, is low.

Louizos, Ullrich & Welling 2017, arXiv:1705.08665
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayeslim.errors import UnsupportedModel
from bayeslim.gates.base import bounded_exp, precise
from bayeslim.gates.centred import centred_kl, log_normal_mean, log_normal_variance
from bayeslim.gates.gaussian import GaussianGate
from bayeslim.io.registry import register
from bayeslim.noise import standard_normal
from bayeslim.priors import LogUniform, Prior
from bayeslim.types import Params

ENTROPY = 0.5 * (1 + math.log(2 * math.pi))
"""The entropy of a standard normal variable."""


@register("gate")
@dataclass(frozen=True)
class NormalJeffreys(GaussianGate):
    """Gates with a prior that is flat in log |z|.

    They are Gaussian or, if centred, log-normal scales of the weights' prior.

    Attributes:
        initial_std: the initial standard deviation of z, whose mean is 1; of log z, if it is centred.
        threshold: gates with a score of at most this are closed. Not given, it is 0 for −log α, and −3 for the log mode
            of centred scales, which starts at 0 and should rather be chosen on validation data.
        centred: whether z is the scale of the weights' prior instead of a factor of the weights.
    """

    threshold: float = math.nan
    centred: bool = False
    name: ClassVar[str] = "normal_jeffreys"

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.isnan(self.threshold):
            object.__setattr__(self, "threshold", -3.0 if self.centred else 0.0)

    @property
    def multiplies(self) -> bool:
        """True unless it is centred."""
        return not self.centred

    def start(self, count: int) -> Params:
        """Return z = 1 with a small standard deviation."""
        if not self.centred:
            return super().start(count)
        return {"log_mean": torch.zeros(count), "log_std": torch.full((count,), math.log(self.initial_std))}

    def draw(self, own: Params, shape: tuple[int, ...]) -> Tensor:
        """Draw z = μ + σ ε; if centred, z = e^(m + √v ε)."""
        if not self.centred:
            return super().draw(own, shape)
        mean, variance = _log_z(own)
        noise = standard_normal((*shape, mean.numel()), dtype=mean.dtype, device=mean.device)
        return bounded_exp(mean + variance.sqrt() * noise)

    def mean(self, own: Params) -> Tensor:
        """Compute μ; if centred, e^(m + v/2)."""
        if not self.centred:
            return super().mean(own)
        return log_normal_mean(*_log_z(own))

    def variance(self, own: Params) -> Tensor:
        """Compute σ²; if centred, (e^v − 1) e^(2m + v)."""
        if not self.centred:
            return super().variance(own)
        return log_normal_variance(*_log_z(own))

    def kl(self, own: Params) -> Tensor:
        """Compute Σ F(|μ| / √2 σ); if centred, minus the entropy of log z.

        The gradient of F in log σ is between −1.3 and 0.
        """
        if not self.centred:
            mean, log_std = precise(own, "mean", "log_std")
            return LogUniform().kl(mean, log_std.exp(), log_std)
        (log_std,) = precise(own, "log_std")
        return -(log_std + ENTROPY).sum()

    def score(self, own: Params) -> Tensor:
        """Compute −log α; if centred, the log of the mode of z, m − v."""
        if not self.centred:
            return super().score(own)
        mean, variance = _log_z(own)
        return mean - variance

    def weight_kl(
        self,
        own: Params,
        mean: Tensor,
        std: Tensor | None,
        groups: Tensor,
        prior: Prior,
        others: Tensor | None = None,
    ) -> Tensor | None:
        """Compute the KL in expectation over z if it is centred (`centred.py`)."""
        if not self.centred:
            return None
        if std is None:
            raise UnsupportedModel(
                "NormalJeffreys(centred=True) needs weights with a posterior: of points, the density grows without end "
                "as they and their scale go to zero. Use family=DiagonalGaussian(), or centred=False."
            )
        return centred_kl(self, *_log_z(own), mean, std, groups, prior)


def _log_z(own: Params) -> tuple[Tensor, Tensor]:
    """Compute the mean and the variance of the log of centred scales."""
    mean, log_std = precise(own, "log_mean", "log_std")
    return mean, bounded_exp(2 * log_std)
