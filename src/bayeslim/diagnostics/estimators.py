"""Effective sample sizes, split R-hat, autocorrelations and energies of chains.

For C chains of n draws with autocorrelations ρ_t, pooled over chains:

    ESS = C n / τ,      τ = 1 + 2 Σ_t ρ_t        summed over Geyer's initial positive, monotone sequence of pairs
    R̂² = (B / W + n − 1) / n                     B/n the variance of the chains' means, W the mean of their variances

Every chain is cut into halves first, so that the halves of a drifting chain disagree. Values are replaced by the
normal quantiles of their ranks, z = Φ⁻¹((r − 3/8) / (S + 1/4)), which makes both right for heavy tails: the bulk. R̂ is
the larger of that of the values and that of their distance from the median. The tail ESS is the smaller one of the
indicators of the 5 % and the 95 % quantile. For a scalar that never changes all are NaN.

Geyer 1992 · Gelman et al. 2013 (BDA3, section 11.4) · Betancourt 2016, arXiv:1604.00695
Vehtari et al. 2021, arXiv:1903.08008
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from bayeslim.errors import ShapeMismatch

MIN_DRAWS = 4
"""The shortest chain that has diagnostics."""

MAX_NUMBERS_PER_CHUNK = 2**22
"""The numbers that are processed at once, to bound memory."""


def ess(values: Tensor, kind: Literal["bulk", "tail", "mean"] = "bulk") -> Tensor:
    """Compute the effective sample size of every scalar.

    It is the number of independent draws that would estimate equally well.

    Args:
        values: (chains, draws, ...).
        kind: "bulk" for the middle of the distribution, "tail" for its quantiles, "mean" for the estimate of the mean.

    Returns:
        of the shape that follows chains and draws, float64.
    """
    estimators: dict[str, Callable[[Tensor], Tensor]] = {
        "bulk": lambda v: _ess(_normal_scores(_halves(v))),
        "tail": _tail,
        "mean": lambda v: _ess(_halves(v)),
    }
    if kind not in estimators:
        raise ValueError(f'kind must be "bulk", "tail" or "mean". Got {kind!r}.')
    return _each(values, estimators[kind])


def r_hat(values: Tensor) -> Tensor:
    """Compute the rank-normalised split R-hat of every scalar; good below 1.01.

    Args:
        values: (chains, draws, ...).
    """
    return _each(values, _r_hat)


def autocorrelation(values: Tensor, lag: int = 1) -> Tensor:
    """Compute the correlation of draws `lag` apart, averaged over chains.

    Args:
        values: (chains, draws, ...).
        lag: the distance of the draws.
    """
    if not 0 <= lag < values.shape[1]:
        raise ValueError(f"lag must be less than the {values.shape[1]} draws of a chain. Got {lag}.")

    def correlation(v: Tensor) -> Tensor:
        covariance = _autocovariance(v).mean(1)
        return covariance[:, lag] / covariance[:, 0]

    return _each(values, correlation)


def e_bfmi(energy: Tensor) -> Tensor:
    """Compute the energy Bayesian fraction of missing information of every chain.

    Below 0.3 the momenta change the energy too little.

        Σ_t (E_t − E_{t−1})² / (n − 1)  over the variance of E

    Args:
        energy: the Hamiltonian at every draw, potential and kinetic, (chains, draws).
    """
    energy = energy.double()
    if energy.ndim != 2 or energy.shape[1] < MIN_DRAWS:
        raise ShapeMismatch(f"Energies must be (chains, draws), at least {MIN_DRAWS} draws. Got {tuple(energy.shape)}.")
    return energy.diff(dim=1).square().mean(1) / energy.var(1)


def _each(values: Tensor, estimator: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply an estimator of (K, chains, draws) to all scalars, in chunks."""
    if values.ndim < 2 or values.shape[1] < MIN_DRAWS:
        raise ShapeMismatch(
            f"Diagnostics need chains of at least {MIN_DRAWS} draws, (chains, draws, ...). Got {tuple(values.shape)}."
        )
    columns = values.detach().flatten(2).movedim(-1, 0) if values.ndim > 2 else values.detach()[None]
    size = max(1, MAX_NUMBERS_PER_CHUNK // (values.shape[0] * values.shape[1]))
    parts = []
    for part in columns.split(size):
        v = part.double().contiguous()
        found = estimator(v)
        constant = (v == v[:, :1, :1]).flatten(1).all(1)
        parts.append(found.masked_fill(constant, math.nan))
    return torch.cat(parts).view(values.shape[2:]) if parts else values.new_zeros(values.shape[2:]).double()


def _tail(v: Tensor) -> Tensor:
    ordered = v.flatten(1).sort(-1).values
    sizes = []
    for fraction in (0.05, 0.95):
        below = v <= _quantile(ordered, fraction)[:, None, None]
        sizes.append(_ess(_halves(below.double())))
    return torch.minimum(*sizes)


def _r_hat(v: Tensor) -> Tensor:
    halves = _halves(v)
    middle = _quantile(halves.flatten(1).sort(-1).values, 0.5)[:, None, None]
    folded = (halves - middle).abs()
    return torch.maximum(_plain_r_hat(_normal_scores(halves)), _plain_r_hat(_normal_scores(folded)))


def _plain_r_hat(v: Tensor) -> Tensor:
    n = v.shape[-1]
    between, within = n * v.mean(-1).var(-1), v.var(-1).mean(-1)
    return ((between / within + n - 1) / n).sqrt()


def _ess(v: Tensor) -> Tensor:
    """Compute C n / τ of (K, C, n)."""
    chains, n = v.shape[1:]
    covariance = _autocovariance(v).mean(1)  # (K, n)
    total = covariance[:, :1] + (v.mean(-1).var(-1)[:, None] if chains > 1 else 0)
    within = covariance[:, :1] * n / (n - 1)
    rho = 1 - (within - covariance) / total
    rho[:, 0] = 1
    pairs = rho[:, : 2 * max(1, (n - 1) // 2)].unflatten(1, (-1, 2)).sum(-1)
    # how many pairs come before the first that is not positive, or the last of all, which is half counted
    count = (pairs > 0).cumprod(1).sum(1, keepdim=True).clamp(max=pairs.shape[1] - 1)
    before = torch.arange(pairs.shape[1], device=v.device) < count
    half = rho.gather(1, 2 * count)
    half = torch.where(pairs.gather(1, count) < 0, half.clamp_min(0), half)[:, 0]
    tau = 2 * (pairs.cummin(1).values * before).sum(1) - 1 + half
    # chains that swing to and fro may beat independent draws, by this much at most
    size: Tensor = chains * n / tau.clamp_min(1 / math.log10(chains * n))
    return size


def _autocovariance(v: Tensor) -> Tensor:
    """Compute (1/n) Σ_s (v_s − v̄)(v_{s+t} − v̄) for every lag t, by an FFT."""
    n = v.shape[-1]
    spectrum = torch.fft.rfft(v - v.mean(-1, keepdim=True), 2 * n)
    covariance: Tensor = torch.fft.irfft(spectrum.abs().square(), 2 * n)[..., :n] / n
    return covariance


def _halves(v: Tensor) -> Tensor:
    """Split every chain in two; the middle draw of an odd number belongs to neither."""
    half = v.shape[-1] // 2
    return torch.cat([v[..., :half], v[..., -half:]], 1)


def _normal_scores(v: Tensor) -> Tensor:
    """Compute the normal quantiles of ranks among all draws; ties share a mean rank."""
    flat = v.flatten(1)
    ordered = flat.sort(-1).values
    rank = (torch.searchsorted(ordered, flat) + torch.searchsorted(ordered, flat, right=True) + 1).to(v.dtype) / 2
    scores: Tensor = torch.special.ndtri((rank - 3 / 8) / (flat.shape[1] + 1 / 4))
    return scores.view(v.shape)


def _quantile(ordered: Tensor, fraction: float) -> Tensor:
    """Compute a quantile of sorted rows, with linear interpolation."""
    place = fraction * (ordered.shape[1] - 1)
    low = math.floor(place)
    high = min(low + 1, ordered.shape[1] - 1)
    return (1 - (place - low)) * ordered[:, low] + (place - low) * ordered[:, high]
