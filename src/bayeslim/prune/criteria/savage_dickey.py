"""The evidence lost by fixing weights at zero, by the Savage-Dickey ratio.

    weight  log p(0) − log q(0)         unit  log p_S(0) − log q_S(0)

It is the log Bayes factor of the model with the weight against the model without it: Bayesian model reduction with the
prior of one weight shrunk to a point. Below zero the evidence *rises* when the weight goes. With q Gaussian and
p = N(0, s²) it is μ²/2σ² + log σ/s.

Dickey 1971 · Friston & Penny 2011
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayeslim.errors import ImproperPrior, NoSiteMatched
from bayeslim.posteriors import Particles, Posterior
from bayeslim.posteriors.saliency import Group
from bayeslim.priors import Prior
from bayeslim.prune.criteria.base import Criterion, register_criterion
from bayeslim.prune.criteria.density import density, unit_density
from bayeslim.prune.criteria.group_log_det import random_groups
from bayeslim.types import Params


def savage_dickey(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """Score weights by log p(0) − log q(0).

    Raises:
        ImproperPrior: if a prior has no density at zero to compare with.
    """
    lost = density(posterior, priors)
    return {name: value + log_prior_at_zero(priors, name, value) for name, value in lost.items()}


def unit_savage_dickey(posterior: Posterior, priors: Mapping[str, Prior], groups: Sequence[Group]) -> Tensor:
    """Score units by log p_S(0) − log q_S(0), for all their weights together."""
    if isinstance(posterior, Particles):
        raise TypeError(
            f"{posterior.count} particles have no joint density of all the weights of a unit to compare with the "
            'prior\'s. Use criterion="density".'
        )
    at_zero = {name: log_prior_at_zero(priors, name, mean.double()) for name, mean in posterior.mean.items()}
    log_prior = [
        sum(float(at_zero[n].flatten()[i].sum()) for n, i in group.items())
        for group in random_groups(posterior, groups)
    ]
    return unit_density(posterior, priors, groups) + torch.tensor(log_prior, dtype=torch.float64)


def log_prior_at_zero(priors: Mapping[str, Prior], name: str, like: Tensor) -> Tensor:
    """Compute log p(0) of every weight of a parameter, shaped like `like`."""
    prior = priors.get(name)
    if prior is None:
        raise NoSiteMatched(f'savage_dickey compares with a prior, and "{name}" has none. Use criterion="density".')
    if not prior.is_proper:
        raise ImproperPrior(
            f'savage_dickey compares evidences, and {type(prior).__name__}, the prior of "{name}", does not integrate '
            'to one. Use criterion="log_alpha", or a proper prior such as priors.Normal(1.0).'
        )
    return prior.log_prob(torch.zeros_like(like)).detach().expand(like.shape)


SAVAGE_DICKEY = register_criterion(Criterion("savage_dickey", savage_dickey, unit_savage_dickey, additive=True))
