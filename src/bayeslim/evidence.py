"""`log_evidence`: log p(D), the probability of the data under the model, for choosing between models.

For a posterior that can be sampled and has a density it is the evidence lower bound,
    log p(D) ≥ E_q[log p(D|w)] − KL(q ‖ p),
with one draw of the weights shared by all the data (noise drawn for every example is not a bound where weights are
reused). Parameters trained as points are held at their values: it is the evidence given those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import singledispatch
from typing import Any

import torch

from bayeslim import stochastic
from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, ImproperPrior
from bayeslim.noise import drawing_from
from bayeslim.posteriors import Diagonal, Posterior
from bayeslim.progress import progress
from bayeslim.results import Evidence
from bayeslim.types import call, device_of, split_batch, to_device


def log_evidence(
    bnn: Bayesian, loader: Iterable[Any], samples: int = 32, *, generator: torch.Generator | None = None
) -> Evidence:
    """Estimate or bound log p(D) of the data in `loader`.

    Args:
        bnn: a Bayesian network.
        loader: the training data, in batches; it is gone through once for every draw.
        samples: Monte-Carlo draws, where the method needs them.
        generator: where the random numbers come from.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1. Got {samples}.")
    if isinstance(loader, Iterator):
        raise TypeError(
            f"log_evidence goes through the data several times, and a {type(loader).__name__} can be read once. "
            "Pass a DataLoader or a list of batches."
        )
    improper = sorted({type(p).__name__ for p in bnn.priors.values() if not p.is_proper})
    if improper:
        raise ImproperPrior(
            f"{', '.join(improper)} does not integrate to one, so the evidence is undefined. "
            "Use a proper prior, such as priors.Normal(1.0), to compare models by evidence."
        )
    with torch.no_grad(), stochastic.evaluating(bnn), drawing_from(generator):
        known = bnn.method.evidence(bnn, loader, samples, generator)
        return known if known is not None else evidence(bnn.posterior_, bnn, loader, samples, generator)


@singledispatch
def evidence(
    posterior: Posterior, bnn: Bayesian, loader: Iterable[Any], samples: int, generator: torch.Generator | None
) -> Evidence:
    """The evidence under a type of posterior; register new ones here."""
    raise BayeslimError(f"No evidence is known for a {type(posterior).__name__} posterior of {bnn.method.name}.")


@evidence.register
def _(
    posterior: Diagonal, bnn: Bayesian, loader: Iterable[Any], samples: int, generator: torch.Generator | None
) -> Evidence:
    device = device_of(bnn.model)
    values, count = [], 0
    for _ in progress(range(samples), "evidence"):
        params = posterior.sample(generator=generator)
        log_lik, count = 0.0, 0
        for batch in loader:
            inputs, targets = to_device(split_batch(batch), device)
            each = bnn.likelihood.log_prob(call(bnn.model, inputs, params), targets)
            log_lik += float(each.double().sum())
            count += len(each)
        # Anew for every draw, since it has a spread of its own where it is estimated.
        values.append(log_lik - _kl(posterior, bnn))
    mean = math.fsum(values) / samples
    squares = math.fsum((v - mean) ** 2 for v in values)
    std_error = math.sqrt(squares / (samples - 1) / samples) if samples > 1 else math.inf
    return Evidence(mean, "elbo", is_bound=True, std_error=std_error, num_data=count)


def _kl(posterior: Diagonal, bnn: Bayesian) -> float:
    """KL(q ‖ p) over the weights that are left."""
    kl = 0.0
    for name, prior in bnn.priors.items():
        kept = bnn.masks.get(name, torch.ones_like(posterior.mean[name], dtype=torch.bool))
        centre, spread = posterior.mean[name][kept].double(), posterior.std[name][kept].double()
        kl += float(prior.at(kept).kl(centre, spread))
    return kl
