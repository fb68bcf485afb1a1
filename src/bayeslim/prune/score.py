"""Scores of single weights: how much a posterior wants each one to stay. Higher = keep.

With the marginal q(w) = N(μ, σ²), σ² = Σ_ii for a correlated posterior:

    magnitude       |μ|
    snr             |μ| / σ                                  signal to noise
    curvature       μ² / 2σ²                                 log-density lost by the best point with w = 0
    density         −log q(0) = μ²/2σ² + log σ + ½ log 2π
    mass            −log P(|w| < ε)
    log_alpha       −log α,  α = σ² / μ²                     Sparse VD cuts at log α > 3: a threshold of −3
    savage_dickey   log p(0) − log q(0)                      the evidence lost by fixing w = 0
    sign_stability  |E sign w| = erf(|μ| / √2 σ)             how sure it is on which side of zero the weight is

`curvature` is the optimal-brain-surgeon saliency (Hassibi & Stork 1993). `savage_dickey` is the log Bayes factor of the
model with the weight against the one without it, by the Savage-Dickey ratio (Dickey 1971): Bayesian model reduction
(Friston & Penny 2011) with the prior of one weight shrunk to a point. Below zero the evidence *rises* when the weight
goes. With q Gaussian and p = N(0, s²) it is μ²/2σ² + log σ/s.

A mixture's density and mass at zero are those of its components, mixed. The other scores see its mean and variance
only, and take a weight that is −1 or +1 for one that may well be zero.

Particles have no density: `particle_score` says what density, mass and sign stability are across them.

Snr, curvature, log_alpha and sign_stability rank weights alike; they differ in what a threshold means. A point mass at
zero (a weight that was cut) scores lowest, one away from zero highest. All scores are float64.

Blundell et al. 2015, arXiv:1505.05424 · Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayeslim.errors import ImproperPrior, NoSiteMatched
from bayeslim.posteriors import Mixture, Particles, Posterior
from bayeslim.priors import Prior
from bayeslim.prune import particle_score
from bayeslim.types import Params

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_NARROW = 1e-4
"""Below this ε/σ the Gaussian is exponential over (−ε, ε) to a relative 1e-8."""


def magnitude(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """|μ|, the baseline that uses no uncertainty; of particles the mean of |w|, since those of several modes cancel."""
    if isinstance(posterior, Particles):
        return {name: particle_score.magnitude(values) for name, values in posterior.values.items()}
    return {name: mean.double().abs() for name, mean in posterior.mean.items()}


def snr(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """|μ| / σ."""
    return {name: _ratio(mean, std) for name, (mean, std) in _marginals(posterior).items()}


def curvature(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """μ² / 2σ²."""
    return {name: _ratio(mean, std).square() / 2 for name, (mean, std) in _marginals(posterior).items()}


def log_alpha(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """−log α = log μ²/σ²."""
    return {name: 2 * _ratio(mean, std).log() for name, (mean, std) in _marginals(posterior).items()}


def density(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """−log q(0)."""
    if isinstance(posterior, Particles):
        return {name: particle_score.kernel_density(values) for name, values in posterior.values.items()}
    if isinstance(posterior, Mixture):
        return mixed(posterior, [density(component, priors) for component in posterior.components])
    return {name: _minus_log_density_at_zero(mean, std) for name, (mean, std) in _marginals(posterior).items()}


def mass(posterior: Posterior, priors: Mapping[str, Prior], epsilon: float = 0.01) -> Params:
    """−log P(|w| < ε), to full relative precision far out in the tails and for an ε far below σ.

    Args:
        posterior: over the weights.
        priors: not used.
        epsilon: what counts as zero; for another value pass `functools.partial(mass, epsilon=...)` as the criterion.
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be a positive number. Got {epsilon}.")
    if isinstance(posterior, Particles):
        return {name: particle_score.near_zero(values, epsilon) for name, values in posterior.values.items()}
    if isinstance(posterior, Mixture):
        return mixed(posterior, [mass(component, priors, epsilon) for component in posterior.components])
    return {name: _minus_log_mass(mean, std, epsilon) for name, (mean, std) in _marginals(posterior).items()}


def savage_dickey(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """Log p(0) − log q(0): the evidence lost when the weight's prior collapses to zero.

    Raises:
        ImproperPrior: if a prior has no density at zero to compare with.
    """
    lost = density(posterior, priors)
    return {name: value + log_prior_at_zero(priors, name, value) for name, value in lost.items()}


def sign_stability(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """|E sign w|."""
    if isinstance(posterior, Particles):
        return {name: particle_score.sign_stability(values) for name, values in posterior.values.items()}
    if isinstance(posterior, Mixture):
        each = [_mean_signs(component) for component in posterior.components]
        weights = posterior.weights.tolist()
        return {
            name: torch.stack([w * signs[name] for w, signs in zip(weights, each, strict=True)]).sum(0).abs()
            for name in each[0]
        }
    return {name: sign.abs() for name, sign in _mean_signs(posterior).items()}


def log_prior_at_zero(priors: Mapping[str, Prior], name: str, like: Tensor) -> Tensor:
    """Log p(0) of every weight of a parameter, of the shape and dtype of `like`."""
    prior = priors.get(name)
    if prior is None:
        raise NoSiteMatched(f'savage_dickey compares with a prior, and "{name}" has none. Use criterion="density".')
    if not prior.is_proper:
        raise ImproperPrior(
            f'savage_dickey compares evidences, and {type(prior).__name__}, the prior of "{name}", does not integrate '
            'to one. Use criterion="log_alpha", or a proper prior such as priors.Normal(1.0).'
        )
    return prior.log_prob(torch.zeros_like(like)).detach().expand(like.shape)


def mixed(posterior: Mixture, costs: Sequence[Params]) -> Params:
    """−log Σ_c π_c exp(−cost_c): a mixture's score from the minus log-densities or masses of its components."""
    return {name: minus_log_mean(posterior, torch.stack([cost[name] for cost in costs])) for name in costs[0]}


def minus_log_mean(posterior: Mixture, costs: Tensor) -> Tensor:
    """The same for the stacked costs of all components, (C, ...)."""
    log_weights = posterior.log_weights.to(costs.device).view(-1, *[1] * (costs.ndim - 1))
    # log π added to an infinite cost of a component that has no part would be undefined
    return -(log_weights - costs).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).logsumexp(0)


def _marginals(posterior: Posterior) -> dict[str, tuple[Tensor, Tensor]]:
    std = posterior.std
    return {name: (mean.double(), std[name].double()) for name, mean in posterior.mean.items()}


def _mean_signs(posterior: Posterior) -> Params:
    """E sign w of Gaussian marginals."""
    return {
        name: mean.sign() * torch.erf(_ratio(mean, std) / math.sqrt(2))
        for name, (mean, std) in _marginals(posterior).items()
    }


def _ratio(mean: Tensor, std: Tensor) -> Tensor:
    """|μ| / σ, zero for a point mass at zero."""
    return torch.where(mean == 0, 0.0, mean.abs() / std)


def _minus_log_density_at_zero(mean: Tensor, std: Tensor) -> Tensor:
    value = _ratio(mean, std).square() / 2 + std.log() + _HALF_LOG_2PI
    return torch.where((std == 0) & (mean != 0), torch.inf, value)


def _minus_log_mass(mean: Tensor, std: Tensor, epsilon: float) -> Tensor:
    centre = mean.abs()
    upper, lower = (epsilon - centre) / std, (-epsilon - centre) / std
    # Around zero P is near one: its distance from one is what has digits. In the tail, its logarithm is.
    outside = (torch.erfc(upper / math.sqrt(2)) + torch.erfc(-lower / math.sqrt(2))) / 2
    inside = torch.log1p(-outside)
    log_upper = torch.special.log_ndtr(upper)
    tail = log_upper + torch.log(-torch.expm1(torch.special.log_ndtr(lower) - log_upper))
    # ∫ exp(wμ/σ²) dw over (−ε, ε) = 2ε · sinh(t)/t with t = εμ/σ²
    tilt = epsilon * centre / std.square()
    log_sinhc = torch.where(tilt < 1e-4, tilt.square() / 6, tilt + torch.log(-torch.expm1(-2 * tilt) / (2 * tilt)))
    narrow = math.log(2 * epsilon) + log_sinhc - _minus_log_density_at_zero(mean, std)
    log_mass = torch.where(epsilon < _NARROW * std, narrow, torch.where(upper > 1, inside, tail))
    point = torch.where(centre < epsilon, 0.0, -torch.inf)
    return -torch.where(std == 0, point, log_mass)
