"""Scores from particles: how much S networks without a density want a weight, or a unit, to stay. Higher = keep.

With w_s the weight in each network, or all weights of a unit as one vector:

    magnitude        (1/S) Σ_s ‖w_s‖                      how large it is in a network, whatever its sign
    snr              ‖w̄‖ / √tr Cov(w)                     the norm of the mean against that of the spread
    mass             −log (1/S) Σ_s [‖w_s‖ < ε √|S|]      the fraction of networks in which it is near zero
    density          −log (1/S) Σ_s N(0 | t_s, h²)        a kernel density at zero, h = 1.06 σ_t S^(−1/5)
    sign_stability   ‖(1/S) Σ_s w_s / ‖w_s‖‖              1 if all networks agree on the sign (direction), 0 if none do

where t_s = w_sᵀ w̄ / ‖w̄‖, the weight itself up to sign, is where a unit stands along its mean. Of a unit with one weight
each is that weight's score. Scores of networks from several modes mean little before their units are matched
(`bayeslim.align`): what is unit 3 in one may be unit 7 in another.

Silverman 1986, Density estimation, §3.4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslim.posteriors.particles import Particles, spread_of
from bayeslim.posteriors.saliency import Group

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def magnitude(values: Tensor) -> Tensor:
    """The mean of |values| (S, ...)."""
    return values.double().abs().mean(0)


def near_zero(values: Tensor, epsilon: float) -> Tensor:
    """−log of the fraction of values (S, ...) that lie within ε of zero."""
    return -(values.abs() < epsilon).double().mean(0).log()


def kernel_density(values: Tensor) -> Tensor:
    """−log of the kernel density of values (S, ...) at zero, by Silverman's rule; a point mass is one."""
    values, count = values.double(), len(values)
    std = spread_of(values)
    width = 1.06 * std * count**-0.2
    log_each = -0.5 * (values / width).square() - width.log() - _HALF_LOG_2PI
    point = torch.where(values[0] == 0, -torch.inf, torch.inf)
    return torch.where(std == 0, point, math.log(count) - log_each.logsumexp(0))


def sign_stability(values: Tensor) -> Tensor:
    """|mean sign| of values (S, ...)."""
    return values.sign().double().mean(0).abs()


def unit_magnitude(posterior: Particles, groups: Sequence[Group]) -> Tensor:
    """The mean norm of the unit's weights."""
    return _each(posterior, groups, lambda w: w.norm(dim=1).mean())


def unit_snr(posterior: Particles, groups: Sequence[Group]) -> Tensor:
    """‖w̄‖ / √tr Cov(w)."""
    return _each(posterior, groups, _snr)


def unit_mass(posterior: Particles, groups: Sequence[Group], epsilon: float = 0.01) -> Tensor:
    """−log of the fraction of networks in which the unit's weights have a root mean square below ε."""
    return _each(posterior, groups, lambda w: near_zero(w.square().mean(1).sqrt(), epsilon))


def unit_density(posterior: Particles, groups: Sequence[Group]) -> Tensor:
    """−log of the kernel density at zero along the unit's mean."""
    return _each(posterior, groups, lambda w: kernel_density(w @ _normalised(w.mean(0))))


def unit_sign_stability(posterior: Particles, groups: Sequence[Group]) -> Tensor:
    """The length of the mean direction."""
    return _each(posterior, groups, lambda w: _normalised(w).mean(0).norm())


def _each(posterior: Particles, groups: Sequence[Group], score: Callable[[Tensor], Tensor]) -> Tensor:
    values = {name: value.flatten(1) for name, value in posterior.values.items()}
    found = []
    for group in groups:
        parts = [values[name][:, index.to(values[name].device)].double() for name, index in group.items()]
        found.append(float(score(torch.cat(parts, 1))))
    return torch.tensor(found, dtype=torch.float64)


def _snr(weights: Tensor) -> Tensor:
    signal = weights.mean(0).norm()
    return torch.where(signal == 0, 0.0, signal / spread_of(weights).norm())


def _normalised(vectors: Tensor) -> Tensor:
    return F.normalize(vectors, dim=-1, eps=torch.finfo(vectors.dtype).tiny)
