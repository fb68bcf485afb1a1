"""The log-uniform prior p(w) ∝ 1/|w|: the prior of variational dropout.

It is flat in log |w|.

It is improper, so KL(N(μ, σ²) ‖ p) is known up to a constant, fixed here so that it goes to 0 as α = σ²/μ² → ∞. It
depends on u = |μ|/(√2 σ) alone, u² = 1/(2α), and D being Dawson's integral it is

    KL = E log |w| − log σ + ½ (γ + log 2) = ½ Σ_k Poisson(k | u²) [ψ(k + ½) − ψ(½)] = F(u),    F(u) = 2 ∫₀ᵘ D(t) dt.

D solves D' = 1 − 2 u D, which gives all its derivatives; so F is evaluated from its Taylor series at the nearest point
of a grid, and beyond the grid from its asymptotic series, F ~ log 2u + γ/2 − Σ_m (2m−1)!! / (2m (2u²)^m).

Approximations of the literature can be used instead (`log_alpha.py`): a fit over all α, one over α ≤ 1, and the bounds

    ½ log(1 + 1/α)  ≤  F  ≤  ½ log(1 + 1/α) + ½ (γ + log 2),

tight as α → ∞ and α → 0. They hold since D(u) ≥ u / (1 + 2u²), so that F less its lower bound only grows with u.

Kingma, Salimans & Welling 2015, arXiv:1506.02557 · Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369 ·
Hron, Matthews & Ghahramani 2018, arXiv:1807.01969, who derive the gradient
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from bayeslim.errors import ImproperPrior
from bayeslim.io.registry import register
from bayeslim.priors import log_alpha
from bayeslim.priors.base import LOG_GAUSSIAN_ENTROPY, Prior
from bayeslim.priors.log_alpha import EULER_GAMMA, LOG_UNIFORM_LIMIT

STEP = 1 / 32
"""The distance between points of the grid."""
END = 16.0
"""The end of the grid; beyond it the asymptotic series is used."""
_TERMS = {torch.float64: 9}
_FEWER_TERMS = 5
_HUGE = 1e30


Divergence = Literal["exact", "approximate", "polynomial", "lower", "upper"]
_CURVES: dict[str, log_alpha.Curve] = {
    "approximate": log_alpha.sigmoid,
    "polynomial": log_alpha.polynomial,
    "lower": log_alpha.relevance,
    "upper": log_alpha.relevance_and_limit,
}


@register("prior")
@dataclass(frozen=True)
class LogUniform(Prior):
    """The density p(w) ∝ 1/|w|; it is improper, so there is no evidence under it.

    Attributes:
        divergence: the KL of independent weights: "exact"; "approximate", the fit of Molchanov et al., off by at most
            0.01 a weight; "polynomial", that of Kingma et al. for α ≤ 1, off by at most 0.05 there and constant beyond;
            or the "lower" or "upper" bound.
    """

    divergence: Divergence = "exact"
    name: ClassVar[str] = "log_uniform"
    is_proper: ClassVar[bool] = False
    is_one_for_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.divergence not in get_args(Divergence):
            known = ", ".join(f'"{name}"' for name in get_args(Divergence))
            raise ValueError(f"LogUniform(divergence=...) must be one of {known}. Got {self.divergence!r}.")

    def log_prob(self, weight: Tensor) -> Tensor:
        """Compute −log |w|, with the constant that matches the KL's."""
        return -weight.abs().log() - LOG_GAUSSIAN_ENTROPY - LOG_UNIFORM_LIMIT

    def kl(self, mean: Tensor, std: Tensor, log_std: Tensor | None = None) -> Tensor:
        """Compute Σ F(|μ|/(√2 σ)), or the approximation that was chosen."""
        log_std = std.log() if log_std is None else log_std
        if self.divergence != "exact":
            return log_alpha.divergence(_CURVES[self.divergence], mean, log_std)
        kl: Tensor = _Divergence.apply(mean, log_std)[0]
        return kl

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, for saving."""
        return {"divergence": self.divergence}

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Raise an `ImproperPrior`: there is nothing to draw from."""
        raise ImproperPrior("LogUniform does not integrate to one, so there are no draws from it.")


class _Divergence(torch.autograd.Function):
    """(μ, log σ) ↦ Σ F(u).

    ∂F/∂μ = sign(μ) F'(u) / (√2 σ), and ∂F/∂log σ = −u F'(u), which is never below −1.3.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
        _, u = _signal(mean, log_std)
        value, slope = _near(u.clamp(max=END))
        far = u > END
        # From the two logarithms, whose difference is exact where u itself is too large.
        log_u = mean.abs().log_().sub_(log_std).sub_(0.5 * math.log(2))
        far_value, far_slope = _far(log_u, u.clamp(min=END))
        slope = torch.where(far, far_slope, slope)
        return torch.where(far, far_value, value).sum(), slope

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, to_kl: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std, slope = ctx.saved_tensors
        inverse, u = _signal(mean, log_std)
        if torch.is_grad_enabled():  # to be differentiated again: F'' = 2 − 2 u F'
            slope = slope + (2 - 2 * u * slope).detach() * (u - u.detach())
        by_u = to_kl * slope
        return by_u * inverse * mean.sign(), -by_u * u


def _signal(mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """Compute 1/(√2 σ) and u, clamped against overflow."""
    inverse = (torch.exp(-log_std) * math.sqrt(0.5)).clamp(max=_HUGE)
    return inverse, (mean.abs() * inverse).clamp(max=_HUGE)


def _near(u: Tensor) -> tuple[Tensor, Tensor]:
    """Compute F and F' within the grid."""
    coefficients = _taylor(u.dtype, u.device)
    nearest = (u / STEP).round_()
    off = u - nearest * STEP
    index = nearest.nan_to_num_().to(torch.int32).reshape(-1)  # a NaN remains in `off`
    value, slope = coefficients[-1].index_select(0, index).view_as(u), torch.zeros_like(u)
    for n in range(2, len(coefficients) + 1):
        slope.mul_(off).add_(value)
        value.mul_(off).add_(coefficients[-n].index_select(0, index).view_as(u))
    return value, slope


def _far(log_u: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Compute F and F' beyond the grid."""
    inverse = u.reciprocal()
    x = inverse.square().mul_(0.5)
    tail = x * (1 / 2 + x * (3 / 4 + x * (15 / 6 + x * (105 / 8 + x * (945 / 10)))))
    rest = x * (1 + x * (3 + x * (15 + x * (105 + x * 945))))
    return log_u.add_(math.log(2) + 0.5 * EULER_GAMMA).sub_(tail), torch.addcmul(inverse, inverse, rest)


def _taylor(dtype: torch.dtype, device: torch.device) -> Tensor:
    return _tabulated(dtype, device)


# The same as torch.compiler.assume_constant_result, which would import the whole compiler.
_taylor._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _tabulated(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Tabulate F⁽ⁿ⁾(u)/n! at every point of the grid, a row for each n."""
    table = torch.tensor(_grid(), dtype=torch.float64).T[: _TERMS.get(dtype, _FEWER_TERMS)]
    return table.to(device=device, dtype=dtype).contiguous()


@cache
def _grid(terms: int = 14) -> list[list[float]]:
    """Compute the Taylor series of F at each grid point from that of the one before."""
    value, dawson, series = 0.0, 0.0, []
    for point in range(round(END / STEP) + 1):
        u = point * STEP
        derivatives = [dawson, 1 - 2 * u * dawson]
        for n in range(1, terms):
            derivatives.append(-2 * u * derivatives[n] - 2 * n * derivatives[n - 1])
        own = [d / math.factorial(n) for n, d in enumerate(derivatives)]
        series.append([value, *(2 * d / (n + 1) for n, d in enumerate(own))])
        value += math.fsum(2 * d / (n + 1) * STEP ** (n + 1) for n, d in enumerate(own))
        dawson = math.fsum(d * STEP**n for n, d in enumerate(own))
    return series
