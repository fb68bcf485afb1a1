"""The horseshoe: half-Cauchy scales of groups, times one of the whole layer.

    z_i = s z̃_i,      s ~ C⁺(0, τ₀),      z̃_i ~ C⁺(0, 1)

The square of a half-Cauchy variable is a product, s² = a b with a ~ Gamma(½, τ₀²) and b ~ InverseGamma(½, 1), in which
log-normal posteriors q = LogNormal(μ, σ²) have closed divergences:

    KL(q(a) ‖ Gamma(½, τ₀²))       = e^(μ + σ²/2) / τ₀² − ½ (μ − log τ₀²) − log σ − ½ (1 + log 2)
    KL(q(b) ‖ InverseGamma(½, 1))  = e^(−μ + σ²/2)      + ½ μ             − log σ − ½ (1 + log 2)

Products of log-normal variables are log-normal: log z ~ N(m, v) with m = ½ Σ μ and v = ¼ Σ σ² over the four factors.

Non-centred, z multiplies the weights: w = z w̃, w̃ ~ N(0, 1). Centred, it is the scale of their prior, w | z ~ N(0, z²)
(`centred.py`).
A group goes where the log of the mode of z, m − v, is low.

Louizos, Ullrich & Welling 2017, arXiv:1705.08665
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayeslim.gates.base import Gate, bounded_exp, positive, precise
from bayeslim.gates.centred import centred_kl, log_normal_mean, log_normal_variance
from bayeslim.io.registry import register
from bayeslim.noise import standard_normal
from bayeslim.priors import Prior
from bayeslim.types import Params

CONSTANT = 0.5 * (1 + math.log(2))


@register("gate")
@dataclass(frozen=True)
class HalfCauchy(Gate):
    """Gates with a horseshoe prior: most are near zero, and a few are large.

    Attributes:
        centred: whether z is the scale of the weights' prior instead of a factor of the weights.
        global_scale: τ₀, the scale of the layer's scale; smaller is sparser.
        initial_std: the initial standard deviation of log z, whose initial median is 1.
        threshold: gates whose log mode is at most this are closed. Log modes have two humps, whose place depends on the
            network and on τ₀: choose it on validation data.
    """

    centred: bool = False
    global_scale: float = 1e-5
    initial_std: float = math.exp(-4.5)
    threshold: float = -3.0

    name: ClassVar[str] = "half_cauchy"
    is_proper: ClassVar[bool] = True
    shared: ClassVar[tuple[str, ...]] = ("layer_a_mean", "layer_a_log_std", "layer_b_mean", "layer_b_log_std")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("global_scale", self.global_scale)
        positive("initial_std", self.initial_std)

    @property
    def multiplies(self) -> bool:
        """True unless it is centred."""
        return not self.centred

    def start(self, count: int) -> Params:
        """Start the layer's scale at its prior, and b, which has a heavy tail, at z = 1."""
        log_scale = 2 * math.log(self.global_scale)
        narrow = math.log(self.initial_std)  # of each of the four factors; log z is half their sum
        return {
            "a_mean": torch.zeros(count),
            "a_log_std": torch.full((count,), narrow),
            "b_mean": torch.full((count,), -log_scale),
            "b_log_std": torch.full((count,), narrow),
            "layer_a_mean": torch.full((1,), log_scale),
            "layer_a_log_std": torch.full((1,), narrow),
            "layer_b_mean": torch.zeros(1),
            "layer_b_log_std": torch.full((1,), narrow),
        }

    def draw(self, own: Params, shape: tuple[int, ...]) -> Tensor:
        """Draw z = s z̃, with one s for all gates of a draw."""
        mean, each, layer = _log_z(own)
        own_noise = standard_normal((*shape, mean.numel()), dtype=mean.dtype, device=mean.device)
        layer_noise = standard_normal((*shape, 1), dtype=mean.dtype, device=mean.device)
        return bounded_exp(mean + each.sqrt() * own_noise + layer.sqrt() * layer_noise)

    def mean(self, own: Params) -> Tensor:
        """Compute e^(m + v/2)."""
        mean, each, layer = _log_z(own)
        return log_normal_mean(mean, each + layer)

    def variance(self, own: Params) -> Tensor:
        """Compute (e^v − 1) e^(2m + v)."""
        mean, each, layer = _log_z(own)
        return log_normal_variance(mean, each + layer)

    def kl(self, own: Params) -> Tensor:
        """Add the divergences of the four factors, that of the layer's scale once."""
        a, a_log_std, b, b_log_std = precise(own, "a_mean", "a_log_std", "b_mean", "b_log_std")
        s, s_log_std, t, t_log_std = precise(own, *self.shared)
        log_scale = 2 * math.log(self.global_scale)
        each = _kl_gamma(a, a_log_std).sum() + _kl_gamma(-b, b_log_std).sum()
        return each + _kl_gamma(s - log_scale, s_log_std).sum() + _kl_gamma(-t, t_log_std).sum()

    def score(self, own: Params) -> Tensor:
        """Compute the log of the mode of z, m − v."""
        mean, each, layer = _log_z(own)
        return mean - each - layer

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
        log_z, each, layer = _log_z(own)
        return centred_kl(self, log_z, each + layer, mean, std, groups, prior)


def _log_z(own: Params) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the mean of log z, and its variance from the gates and from the layer."""
    a, b, s, t = precise(own, "a_mean", "b_mean", "layer_a_mean", "layer_b_mean")
    log_stds = precise(own, "a_log_std", "b_log_std", "layer_a_log_std", "layer_b_log_std")
    of_a, of_b, of_s, of_t = (bounded_exp(2 * log_std) for log_std in log_stds)
    return 0.5 * (a + b + s + t), 0.25 * (of_a + of_b), 0.25 * (of_s + of_t)


def _kl_gamma(log_mean: Tensor, log_std: Tensor) -> Tensor:
    """Compute KL(LogNormal(μ, σ²) ‖ Gamma(½, 1)); −μ gives the inverse Gamma's."""
    energy = bounded_exp(log_mean + 0.5 * bounded_exp(2 * log_std))
    return energy - 0.5 * log_mean - log_std - CONSTANT
