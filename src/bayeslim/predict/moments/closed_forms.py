"""Mean, variance and slope of an activation of a Gaussian.

For z ~ N(m, v) and an activation f, three numbers go on to the next layer:

    E[f(z)],    Var[f(z)],    slope = Cov[f(z), z] / v = E[f'(z)]    (Stein)

Piecewise linear activations have closed forms in Φ and φ (for the rectifier: Frey & Hinton 1999, "Variational learning
in nonlinear Gaussian belief networks"); smooth ones take a Gauss-Hermite rule of 16 points.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Moments3 = tuple[Tensor, Tensor, Tensor]
"""Mean, variance and slope."""

QUADRATURE_POINTS = 16
"""Points of the Gauss-Hermite rule: exact for polynomials of degree 31."""

MAX_STANDARD_DEVIATIONS = 12.0
"""Standard deviations beyond which a rectifier is linear or zero to double precision's last digit."""


def relu(mean: Tensor, variance: Tensor) -> Moments3:
    """Compute the moments of max(z, 0).

    With a = m/s and u = a Φ(a) + φ(a): E = m Φ(a) + s φ(a) and Var = v (Φ(a) − u (u − a)).
    """
    std = variance.sqrt()
    a = (mean / std.clamp_min(torch.finfo(std.dtype).tiny)).clamp_(-MAX_STANDARD_DEVIATIONS, MAX_STANDARD_DEVIATIONS)
    # Temporaries are large and the arithmetic is light: in-place operations save time, and so do powers of two.
    constant = torch.full((), -0.5 * math.log2(2 * math.pi), dtype=a.dtype, device=a.device)
    density = torch.addcmul(constant, a, a, value=-0.5 / math.log(2)).exp2_()
    below = torch.erf(a * math.sqrt(0.5)).mul_(0.5).add_(0.5)
    u = torch.addcmul(density, a, below)
    spread = torch.addcmul(below, u, a.sub_(u)).clamp_(min=0).mul_(variance)
    return density.mul_(std).addcmul_(mean, below), spread, below


def leaky_relu(mean: Tensor, variance: Tensor, leak: float) -> Moments3:
    """Compute the moments of leak · z + (1 − leak) max(z, 0).

    The covariance of z and max(z, 0) is v Φ(a).
    """
    rectified, spread, slope = relu(mean, variance)
    rest = 1 - leak
    total = leak**2 * variance + 2 * leak * rest * variance * slope + rest**2 * spread
    return leak * mean + rest * rectified, total, leak + rest * slope


def clamp(mean: Tensor, variance: Tensor, low: float | None, high: float | None) -> Moments3:
    """Compute the moments of low + max(z − low, 0) − max(z − high, 0)."""
    if low is None:
        if high is None:
            return mean, variance, torch.ones_like(mean)
        mirrored, spread, slope = clamp(-mean, variance, -high, None)
        return -mirrored, spread, slope
    above_low, spread, slope = relu(mean - low, variance)
    if high is None:
        return low + above_low, spread, slope
    above_high, cut, steeper = relu(mean - high, variance)
    # Above `high` both rectifiers are positive, and the first is the second plus (high − low).
    covariance = cut + above_high.square() + (high - low) * above_high - above_low * above_high
    return low + above_low - above_high, (spread + cut - 2 * covariance).clamp_(min=0), slope - steeper


def quadrature(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Moments3:
    """Compute the moments of a smooth function by Gauss-Hermite quadrature."""
    points, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE_POINTS)
    weights = weights / weights.sum()
    std = variance.sqrt()
    # Moments about f(m) rather than about zero: no digits cancel where the spread is small.
    centre = function(mean)
    first, second, with_input = (torch.zeros_like(mean) for _ in range(3))
    for point, weight in zip(points.tolist(), weights.tolist(), strict=True):
        off = function(torch.add(mean, std, alpha=point)).sub_(centre)
        with_input.add_(off, alpha=weight * point)
        first.add_(off, alpha=weight)
        second.addcmul_(off, off, value=weight)
    slope = with_input.div_(std.clamp_min_(torch.finfo(std.dtype).tiny))
    return centre + first, (second - first.square()).clamp_(min=0), slope
