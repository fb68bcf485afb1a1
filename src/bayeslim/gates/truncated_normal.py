"""The standard normal on an interval [a, b], also far in its tails.

    log Z = log(Φ(b) − Φ(a)),     H = ½ log 2πe + log Z + (a φ(a) − b φ(b)) / 2Z,     x = Φ⁻¹(Φ(a) + u Z)

An interval on the right is mirrored to the left, where Φ is small and differences of it are exact. In the tail the
entropy is a difference of squares that nearly cancel. There it is written in the Mills ratio M(x) = Φ(x)/φ(x), which
has no exponential in it, and in the excess g(x) = x + 1/M(x) = 1/t − 2/t³ + 10/t⁵ − ..., t = −x. Double precision
throughout.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.special import log_ndtr, ndtri

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
TAIL = 30.0
"""Standard deviations from which on the series of g is exact."""
EXCESS = (1.0, -2.0, 10.0, -74.0, 706.0, -8162.0, 110410.0)
"""Its coefficients: g' = g (t + g) − 1 in t gives each from those before it."""
FAR = -600.0
"""The log of probabilities that are too small for Φ⁻¹ itself, so that the tail's expansion is taken."""


def log_mass(a: Tensor, b: Tensor) -> Tensor:
    """Log(Φ(b) − Φ(a)), for a < b."""
    a, b = _on_the_left(a, b)
    upper = _log_ndtr(b)
    return upper + torch.log(-torch.expm1(_log_ndtr(a) - upper))


def log_mass_over_edge(a: Tensor, b: Tensor) -> Tensor:
    """Log((Φ(b) − Φ(a)) / φ(b)), for a < b < 0."""
    log_mills, _ = _mills(b)
    return log_mills + torch.log(-torch.expm1(_log_ratio(a, b)))


def entropy(a: Tensor, b: Tensor) -> Tensor:
    """Compute the entropy of the standard normal on [a, b]."""
    a, b = _on_the_left(a, b)
    return torch.where(b < 0, _entropy_of_a_tail(a, b.clamp(max=0)), _entropy_around_zero(a, b.clamp(min=0)))


def _entropy_around_zero(a: Tensor, b: Tensor) -> Tensor:
    mass = log_mass(a, b)
    at_a, at_b = ((-0.5 * edge.square() - HALF_LOG_2PI - mass).exp() for edge in (a, b))
    return 0.5 + HALF_LOG_2PI + mass + 0.5 * (a * at_a - b * at_b)


def _entropy_of_a_tail(a: Tensor, b: Tensor) -> Tensor:
    log_mills, excess = _mills(b)
    ratio = _log_ratio(a, b)  # log Φ(a)/Φ(b)
    odds = ratio.exp() / -torch.expm1(ratio)
    slope = excess - b  # 1/M(b)
    at_a = slope * (1 + odds) * (0.5 * (b - a) * (b + a)).exp()
    return 0.5 + log_mills + torch.log(-torch.expm1(ratio)) + 0.5 * (a * at_a - b * (excess + slope * odds))


def draw(a: Tensor, b: Tensor, u: Tensor) -> Tensor:
    """X with the fraction u of the mass below it, differentiable in a and b.

    From F(x) = u, dx = (1 − u) φ(a)/φ(x) da + u φ(b)/φ(x) db.
    """
    with torch.no_grad():
        left, right = _on_the_left(a, b)
        upper = log_ndtr(right)
        ratio = (log_ndtr(left) - upper).exp()
        below = torch.where(a + b > 0, 1 - u, u)
        x = inverse_log_ndtr(upper + torch.log(ratio + below * (1 - ratio)))
        x = torch.clamp(torch.where(a + b > 0, -x, x), a, b)
        by_a = (1 - u) * (0.5 * (x - a) * (x + a)).exp()
        by_b = u * (0.5 * (x - b) * (x + b)).exp()
    return x + by_a * (a - a.detach()) + by_b * (b - b.detach())


def inverse_log_ndtr(log_probability: Tensor) -> Tensor:
    """X with log Φ(x) as given; exact where Φ is not close to one.

    In the far tail −2 log Φ(−t) = t² + 2 log t + log 2π + 2 t⁻² − 5 t⁻⁴ + ..., solved for t² by iteration, which gains
    a factor t² each time.
    """
    near = ndtri(log_probability.clamp(min=FAR).exp())
    whole = -2 * (log_probability.clamp(max=FAR) + HALF_LOG_2PI)
    square = whole - whole.log()
    for _ in range(2):
        inverse = square.reciprocal()
        square = whole - square.log() - inverse * (2 - inverse * (5 - 74 / 3 * inverse))
    t = square.sqrt()
    return torch.where(log_probability < FAR, -t, near)


def _on_the_left(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Mirror the interval where its middle is positive."""
    mirrored = a + b > 0
    return torch.where(mirrored, -b, a), torch.where(mirrored, -a, b)


def _mills(x: Tensor) -> tuple[Tensor, Tensor]:
    """Log M(x) and g(x), for x that are not large."""
    near = x.clamp(min=-TAIL)
    log_near = log_ndtr(near) + 0.5 * near.square() + HALF_LOG_2PI
    t = (-x).clamp(min=TAIL)
    step = t.square().reciprocal()
    series = torch.zeros_like(t)
    for coefficient in reversed(EXCESS):
        series = series * step + coefficient
    far = series / t
    in_tail = x < -TAIL
    return torch.where(in_tail, -torch.log(t + far), log_near), torch.where(in_tail, far, near + torch.exp(-log_near))


def _log_ndtr(x: Tensor) -> Tensor:
    """Log Φ(x), whose slope torch takes from a difference of squares."""
    tail = _mills(x.clamp(max=-TAIL))[0] - 0.5 * x.square() - HALF_LOG_2PI
    return torch.where(x < -TAIL, tail, log_ndtr(x.clamp(min=-TAIL)))


def _log_ratio(a: Tensor, b: Tensor) -> Tensor:
    """Log Φ(a)/Φ(b), for a < b that are not large."""
    return 0.5 * (b - a) * (b + a) + _mills(a)[0] - _mills(b)[0]
