"""Structured Bayesian pruning: log-normal scales on an interval.

    q(z) = LogNormal(μ, σ²) on [a, b],      p(z) ∝ 1/z on [a, b],      log a = −20, log b = 0
    KL(q ‖ p) = log(log b − log a) − H(q(log z)),      E z^k = e^(kμ + k²σ²/2) · Z_k / Z_0,
    Z_k = Φ(B − kσ) − Φ(A − kσ),      A = (log a − μ)/σ,      B = (log b − μ)/σ

The prior is flat in log z on the interval. It is proper, so it leaves no constant undetermined. A group goes where the
signal-to-noise ratio E z / √Var z is below one. Scales are drawn by the inverse of the distribution function.

Neklyudov, Molchanov, Ashukha & Vetrov 2017, arXiv:1705.07283
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayeslim.gates import truncated_normal
from bayeslim.gates.base import Gate, positive, precise, uniform
from bayeslim.gates.truncated_normal import log_mass, log_mass_over_edge
from bayeslim.io.registry import register
from bayeslim.types import Params

MAX_LOG_STD = 10.0
"""The largest log σ: beyond it q is the prior to nine digits."""


@register("gate")
@dataclass(frozen=True)
class TruncatedLogNormal(Gate):
    """Gates in (0, 1], a priori flat in log z.

    Attributes:
        log_low: the log of the smallest scale.
        log_high: the log of the largest.
        initial_std: the initial σ, where μ = 0.
        threshold: gates with a signal-to-noise ratio of at most this are closed.
    """

    log_low: float = -20.0
    log_high: float = 0.0
    initial_std: float = math.exp(-5.0)
    threshold: float = 1.0
    name: ClassVar[str] = "truncated_log_normal"
    is_proper: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("initial_std", self.initial_std)
        if not -math.inf < self.log_low < self.log_high < math.inf:
            raise ValueError(f"log_low must be below log_high. Got {self.log_low!r} and {self.log_high!r}.")

    def start(self, count: int) -> Params:
        """Return scales just below one, with a small standard deviation."""
        return {"log_mean": torch.zeros(count), "log_std": torch.full((count,), math.log(self.initial_std))}

    def draw(self, own: Params, shape: tuple[int, ...]) -> Tensor:
        """Draw z = e^(μ + σ x), x standard normal on [A, B]."""
        mean, log_std, a, b = self.standardised(own)
        x = truncated_normal.draw(a, b, uniform((*shape, mean.numel()), mean))
        log_z = (mean + log_std.exp() * x).clamp(self.log_low, self.log_high)
        return log_z.exp().to(precise(own, "log_mean")[0])

    def mean(self, own: Params) -> Tensor:
        """Compute E[z]."""
        return self._log_moment(own, 1).exp().to(precise(own, "log_mean")[0])

    def variance(self, own: Params) -> Tensor:
        """Compute E[z]² (E[z²]/E[z]² − 1)."""
        return ((2 * self._log_moment(own, 1)).exp() * self._noise(own)).to(precise(own, "log_mean")[0])

    def kl(self, own: Params) -> Tensor:
        """Compute log(log b − log a) − H, summed."""
        _, log_std, a, b = self.standardised(own)
        each = math.log(self.log_high - self.log_low) - log_std - truncated_normal.entropy(a, b)
        return each.sum().to(precise(own, "log_mean")[0])

    def score(self, own: Params) -> Tensor:
        """Compute the signal-to-noise ratio, E z / √Var z."""
        return self._noise(own).rsqrt().to(precise(own, "log_mean")[0])

    def _noise(self, own: Params) -> Tensor:
        """Compute Var z / E[z]², positive."""
        ratio = torch.expm1(self._log_moment(own, 2) - 2 * self._log_moment(own, 1))
        return ratio.clamp(min=torch.finfo(torch.float32).tiny)

    def _log_moment(self, own: Params, k: int) -> Tensor:
        """Compute log E[z^k].

        Where the mass is in a tail of the normal, at an end of the interval, squares that cancel are left out:
        log E[z^k] = k log b + log(Z_k / φ(B − kσ)) − log(Z_0 / φ(B)), and likewise at a.
        """
        mean, log_std, a, b = self.standardised(own)
        shift = k * log_std.exp()
        whole = k * mean + 0.5 * shift.square() + log_mass(a - shift, b - shift) - log_mass(a, b)
        at_high = k * self.log_high + _over_edges(a, b, -shift, b < 0)
        at_low = k * self.log_low + _over_edges(-b, -a, shift, a > shift)
        return torch.where(b < 0, at_high, torch.where(a > shift, at_low, whole))

    def standardised(self, own: Params) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute μ, log σ, and the standardised ends of the interval, in float64."""
        mean, log_std = own["log_mean"].double(), own["log_std"].double().clamp(max=MAX_LOG_STD)
        std = log_std.exp()
        return mean, log_std, (self.log_low - mean) / std, (self.log_high - mean) / std


def _over_edges(a: Tensor, b: Tensor, shift: Tensor, where: Tensor) -> Tensor:
    """Compare log(mass / φ at the edge) of the shifted interval with that of [a, b].

    Where `where` is False a harmless interval takes its place, so that gradients stay finite.
    """
    a, b = torch.where(where, a, -2 - shift.abs()), torch.where(where, b, -1 - shift.abs())
    return log_mass_over_edge(a + shift, b + shift) - log_mass_over_edge(a, b)
