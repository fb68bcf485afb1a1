"""The standard normal distribution on an interval [a, b], however far in its tails: mass, entropy, draws.

    log Z = log(Φ(b) − Φ(a)),     H = log(√(2πe) Z) + (a φ(a) − b φ(b)) / 2Z,     x = Φ⁻¹(Φ(a) + u Z)

Everything is computed from log Φ, on the side on which Φ is small, where differences of it are exact. Functions take
and give double precision: entropies are differences of squares of a and b.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.special import log_ndtr, ndtri

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
FAR = -600.0
"""The log of probabilities that are too small for Φ⁻¹ itself, so that the tail's expansion is taken."""


def log_mass(a: Tensor, b: Tensor) -> Tensor:
    """Log(Φ(b) − Φ(a)), for a < b."""
    mirrored = a + b > 0
    a, b = torch.where(mirrored, -b, a), torch.where(mirrored, -a, b)
    upper: Tensor = log_ndtr(b)
    return upper + torch.log(-torch.expm1(log_ndtr(a) - upper))


def entropy(a: Tensor, b: Tensor) -> Tensor:
    """The entropy of the standard normal on [a, b]."""
    mass = log_mass(a, b)
    at_a, at_b = ((-0.5 * edge.square() - HALF_LOG_2PI - mass).exp() for edge in (a, b))
    return 0.5 + HALF_LOG_2PI + mass + 0.5 * (a * at_a - b * at_b)


def draw(a: Tensor, b: Tensor, u: Tensor) -> Tensor:
    """X with the fraction u of the mass below it, differentiable in a and b.

    From F(x) = u, dx = (1 − u) φ(a)/φ(x) da + u φ(b)/φ(x) db.
    """
    with torch.no_grad():
        mass = log_mass(a, b)
        below = torch.logaddexp(log_ndtr(a), u.log() + mass)
        above = torch.logaddexp(log_ndtr(-b), torch.log1p(-u) + mass)
        x = inverse_log_ndtr(torch.minimum(below, above))
        x = torch.clamp(torch.where(below < above, x, -x), a, b)
        by_a = (1 - u) * (0.5 * (x - a) * (x + a)).exp()
        by_b = u * (0.5 * (x - b) * (x + b)).exp()
    return x + by_a * (a - a.detach()) + by_b * (b - b.detach())


def inverse_log_ndtr(log_probability: Tensor) -> Tensor:
    """X with log Φ(x) as given, at most log ½.

    In the far tail log Φ(−t) = −t²/2 − log t − ½ log 2π + log(1 − t⁻² + 3 t⁻⁴ − ...), solved for t by iteration, which
    gains a factor t² each time.
    """
    near = ndtri(log_probability.clamp(min=FAR).exp())
    square = -2 * (log_probability.clamp(max=FAR) + HALF_LOG_2PI)
    t = square.sqrt()
    for _ in range(4):
        inverse = t.square().reciprocal()
        series = -inverse * (1 - inverse * (3 - 15 * inverse))
        t = (square - 2 * t.log() + 2 * torch.log1p(series)).sqrt()
    return torch.where(log_probability < FAR, -t, near)
