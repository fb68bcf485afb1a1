"""`log_evidence`: log p(D), the probability of the data under the model, for choosing between models.

For a posterior that can be sampled and has a density it is the evidence lower bound,
    log p(D) ≥ E_q[log p(D|w)] − KL(q ‖ p),
with one draw of the weights shared by all the data (noise drawn for every example is not a bound where weights are
reused). Parameters trained as points are held at their values: it is the evidence given those.

From the same draws there is an estimate for every order α of Rényi's divergence (`renyi.py`), for any posterior with a
density: with `renyi=0` the importance-weighted bound, which comes closer to log p(D) the more samples there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, ImproperPrior, check_whole
from bayeslim.evidence import renyi as renyi_bounds
from bayeslim.families.base import log_prior
from bayeslim.noise import drawing_from, on_device
from bayeslim.posteriors import Diagonal, Gated, LowRankCovariance, Mixture, Posterior
from bayeslim.results import Evidence
from bayeslim.train.loaders import check_labelled
from bayeslim.train.progress import progress as progress_bar
from bayeslim.train.progress import showing
from bayeslim.types import Params, arguments, call, device_of, inputs_of, split_batch, to_device


def log_evidence(
    bnn: Bayesian,
    loader: Iterable[Any],
    samples: int = 32,
    *,
    renyi: float | None = None,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> Evidence:
    """Estimate or bound log p(D) of the data in `loader`.

    Args:
        bnn: a Bayesian network.
        loader: the training data, in batches; it is read once for every draw.
        samples: Monte-Carlo draws, where the method needs them.
        renyi: estimate it at this order α from draws of the posterior, instead of as the method does: 0 is the
            importance-weighted bound, 1 the ELBO. A lower bound for α ≥ 0; no bound for α < 0.
        generator: where the random numbers come from.
        progress: whether to show progress bars; `BAYESLIM_PROGRESS=0` in the environment turns all of them off.
    """
    check_whole("samples", samples)
    if isinstance(loader, Iterator):
        raise TypeError(
            f"log_evidence goes through the data several times, and a {type(loader).__name__} can be read once. "
            "Pass a DataLoader or a list of batches."
        )
    if renyi is not None:
        renyi_bounds.check(renyi)
    if isinstance(loader, Sized) and not len(loader):
        raise BayeslimError("The loader has no batches. Pass the data whose evidence to find.")
    if improper := bnn.method.improper(bnn):
        raise ImproperPrior(
            f"{', '.join(improper)} does not integrate to one, so the evidence is undefined. "
            "Use a proper prior, such as priors.Normal(1.0), to compare models by evidence."
        )
    check_labelled(bnn.likelihood, (split_batch(batch)[1] for batch in loader))
    generator = on_device(generator, device_of(bnn.model))
    with showing(progress), torch.no_grad(), drawing_from(generator):
        first = next((inputs_of(batch) for batch in loader), None)
        bnn = bnn.replica(to_device(first, device_of(bnn.model)))
        if renyi is not None:
            found = _renyi(bnn.posterior_, bnn, (loader, samples, generator), renyi)
        else:
            known = bnn.method.evidence(bnn, loader, samples, generator)
            found = known if known is not None else evidence(bnn.posterior_, bnn, loader, samples, generator)
    if not math.isfinite(found.value):
        _explain(found, loader)
    return found


def _explain(found: Evidence, loader: Iterable[Any]) -> None:
    """Raise an error that names the batch with NaN or infinity.

    If log p(D) = −∞ and all data are finite, a likelihood is zero, and nothing is raised.
    """
    for number, batch in enumerate(loader):
        inputs, targets = split_batch(batch)
        for what, values in (("inputs", inputs), ("targets", targets)):
            args, kwargs = arguments(values)
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                raise BayeslimError(
                    f"The {what} of batch {number} hold NaN or infinite values, so there is no evidence. "
                    "Leave these examples out."
                )
    if found.value != -math.inf:
        raise BayeslimError(
            f"The evidence is {found.value}, though the data are finite: the network's weights or outputs are not. "
            "Fit it again, with a smaller learning rate."
        )


@singledispatch
def evidence(
    posterior: Posterior, bnn: Bayesian, loader: Iterable[Any], samples: int, generator: torch.Generator | None
) -> Evidence:
    """Estimate the evidence under a type of posterior; register new ones here."""
    raise BayeslimError(
        f"No evidence is known for a {type(posterior).__name__} posterior of {bnn.method.name}. Compare networks by "
        "their NLL on held-out data, or use bl.Laplace() or bl.Variational()."
    )


@evidence.register
def _(posterior: Diagonal, bnn: Bayesian, *data: Any) -> Evidence:
    # The KL is computed for every draw: where it is estimated, it adds to the standard error.
    return _estimate(posterior, bnn, data, lambda _: _kl(posterior, bnn))


@evidence.register
def _(posterior: Gated, bnn: Bayesian, *data: Any) -> Evidence:
    method: Any = bnn.method  # only Variational has gates
    return _estimate(posterior.opened(), bnn, data, lambda _: float(method.kl(bnn)))


@evidence.register
def _(posterior: LowRankCovariance, bnn: Bayesian, *data: Any) -> Evidence:
    log_stds = [posterior.std[name][random].double().log().sum() for name, random in posterior.support.items()]
    # The KL of the marginals ignores correlations between weights.
    correlation = float(torch.stack(log_stds).sum() + 0.5 * posterior.log_det_precision())
    return _estimate(posterior, bnn, data, lambda _: _kl(posterior, bnn) + correlation)


@evidence.register
def _(posterior: Mixture, bnn: Bayesian, *data: Any) -> Evidence:
    return _renyi(posterior, bnn, data, 1.0)


def _renyi(posterior: Posterior, bnn: Bayesian, data: tuple[Any, ...], alpha: float) -> Evidence:
    """Estimate the bound of order α from the densities of draws."""

    def cost(params: Params) -> float:
        prior = log_prior(bnn.priors, {name: value.double() for name, value in params.items()}, bnn.masks)
        return float(posterior.log_prob(params)) - float(prior)

    return _estimate(posterior, bnn, data, cost, alpha)


def _estimate(
    posterior: Posterior, bnn: Bayesian, data: tuple[Any, ...], cost: Callable[[Params], float], alpha: float = 1.0
) -> Evidence:
    """Estimate the bound of order α from draws' log-weights log p(D|w) − cost(w)."""
    (loader, samples, generator), values, count = data, [], 0
    for _ in progress_bar(range(samples), "evidence"):
        params = posterior.sample(generator=generator)
        log_lik, count = _log_likelihood(bnn, loader, params)
        values.append(log_lik - cost(params))
    log_weights = torch.tensor(values, dtype=torch.float64)
    return Evidence(
        float(renyi_bounds.bound(log_weights, alpha)),
        renyi_bounds.kind(alpha),
        is_bound=renyi_bounds.is_lower_bound(alpha),
        std_error=renyi_bounds.standard_error(log_weights, alpha),
        num_data=count,
    )


def _log_likelihood(bnn: Bayesian, loader: Iterable[Any], params: Params) -> tuple[float, int]:
    """Compute log p(D|w), and count the data."""
    device = device_of(bnn.model)
    total, count = 0.0, 0
    for batch in loader:
        inputs, targets = to_device(split_batch(batch), device)
        each = bnn.likelihood.log_prob(call(bnn.model, inputs, params), targets)
        total += float(each.double().sum())
        count += len(each)
    return total, count


def _kl(posterior: Posterior, bnn: Bayesian) -> float:
    """Compute KL(q ‖ p) over the weights that are left, from the marginals of q."""
    kl = 0.0
    for name, prior in bnn.priors.items():
        kept = bnn.masks.get(name, torch.ones_like(posterior.mean[name], dtype=torch.bool))
        centre, spread = posterior.mean[name][kept].double(), posterior.std[name][kept].double()
        kl += float(prior.at(kept).kl(centre, spread))
    return kl
