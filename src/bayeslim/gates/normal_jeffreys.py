"""Gaussian scales under the normal-Jeffreys prior p(z) ∝ 1/|z|.

    q(z) = N(μ, σ²),      KL(q ‖ p) = F(|μ| / √2 σ),      α = σ²/μ²

With w | z ~ N(0, z²) the prior of a weight is log-uniform; here all weights of a group share their z. F is the
divergence of variational dropout, exact and vanishing as α → ∞ (`priors.LogUniform`). A group goes where log α is
large; the paper reads the threshold off a histogram of log α, which has two humps.

Louizos, Ullrich & Welling 2017, arXiv:1705.08665
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bayeslim.gates.base import precise
from bayeslim.gates.gaussian import GaussianGate
from bayeslim.priors import LogUniform
from bayeslim.types import Params


@dataclass(frozen=True)
class NormalJeffreys(GaussianGate):
    """Gates z ~ N(μ, σ²), a priori flat in log |z|."""

    name: ClassVar[str] = "normal_jeffreys"

    def kl(self, own: Params) -> Tensor:
        """Σ F(|μ| / √2 σ), with a gradient in log σ between −1.3 and 0."""
        mean, log_std = precise(own, "mean", "log_std")
        return LogUniform().kl(mean, log_std.exp(), log_std)
