"""Tuning the prior precision of a fitted Laplace posterior: by evidence, on validation data, or by cross-validation.

Evidence is maximised by gradients (`bayeslim.evidence.marginal_likelihood`). The other two take the best of a grid, by
the mean log-probability of held-out targets. In cross-validation the network must not have seen the fold it is tested
on: one Newton step moves it to the optimum of the other folds,

    w_k = w* − P_k⁻¹ (−∇ log p(D₋ₖ | w*) + δ (w* − m))        P_k = H(D₋ₖ) + δ,

which for a linear network with a Gaussian likelihood is exact, and for others the leading order.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from bayeslim.curvature.sweep import sum_over_processes
from bayeslim.errors import BayeslimError, BayeslimWarning, NotPositiveDefinite
from bayeslim.evidence import marginal_likelihood
from bayeslim.evidence.relevance import Per, maximise_relevance
from bayeslim.likelihoods import Gaussian as GaussianLikelihood
from bayeslim.posteriors import Gaussian
from bayeslim.posteriors import prior_precision as precisions
from bayeslim.posteriors.prior_precision import PriorPrecision
from bayeslim.priors import Normal
from bayeslim.replica import replicate
from bayeslim.train.loaders import ignored_class
from bayeslim.types import Inputs, Params, call, device_of, split_batch, to_device

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian

GRID: tuple[float, ...] = tuple(10 ** (k / 2) for k in range(-8, 9))
"""The prior precisions to try, 1e-4 to 1e4."""

SAMPLES = 32
"""Draws of the outputs for a predictive density without a closed form."""


def by_evidence_(bnn: Bayesian, loader: Iterable[Any], per: Per = "network", in_place: bool = False) -> float:
    """Give the posterior the prior precision of the largest evidence, and return that.

    A learned Gaussian noise is tuned too, unless units or weights have precisions of their own.

    Args:
        bnn: a fitted network; its posterior, priors and learned noise change.
        loader: the training data.
        per: the weights that share a precision: of the "network", a "layer", a "unit" or a single "weight".
        in_place: whether to write into the tensors of `hold_in_tensors_`.
    """
    data = marginal_likelihood.data_term(bnn.model, bnn.likelihood, loader)
    posterior = cast("Gaussian", bnn.posterior_)
    if per in ("unit", "weight"):
        tuned = maximise_relevance(posterior, prior_mean(bnn), data, per)
    else:
        tuned = marginal_likelihood.maximise(
            posterior, prior_mean(bnn), data, per_layer=per == "layer", likelihood=bnn.likelihood
        )
    if tuned.noise is not None:
        assert isinstance(bnn.likelihood, GaussianLikelihood)
        with torch.no_grad():
            bnn.likelihood.log_noise.fill_(tuned.noise).log_()
    set_prior_(bnn, tuned.posterior, tuned.prior_precision, in_place)
    return tuned.log_evidence


def by_validation_(bnn: Bayesian, validate: Iterable[Any]) -> float:
    """Give the posterior the grid's best prior precision on validation data."""
    posterior = cast("Gaussian", bnn.posterior_)
    losses = []
    try:
        for delta in GRID:
            found = _under(posterior, delta)
            bnn.state["posterior"] = found
            losses.append(torch.inf if found is None else predictive_nll(bnn, validate))
    finally:
        bnn.state["posterior"] = posterior
    return _take_best(bnn, posterior, torch.tensor(losses))


def by_cross_validation_(
    bnn: Bayesian,
    loader: Iterable[Any],
    measure: Callable[[Bayesian, Iterable[Any]], Gaussian],
    folds: int = 5,
) -> float:
    """Give the posterior the grid's best prior precision on held-out folds.

    Args:
        bnn: a fitted network; its posterior and priors change.
        loader: the training data; every `folds`-th batch is held out together.
        measure: the posterior at a network's weights, from some of the data.
        folds: how many parts.
    """
    batches = list(loader)
    if not 2 <= folds <= len(batches):
        raise BayeslimError(
            f"Cross-validation in {folds} folds needs 2 or more folds and as many batches. Got {len(batches)} batches. "
            "Use smaller batches or fewer folds."
        )
    posterior = cast("Gaussian", bnn.posterior_)
    losses = torch.zeros(len(GRID))
    for fold in range(folds):
        rest = [batch for k, batch in enumerate(batches) if k % folds != fold]
        twin = copy.deepcopy(bnn)
        base = measure(twin, rest)
        slope = _gradient(twin, base.names, rest)
        for k, delta in enumerate(GRID):
            found = _under(base, delta)
            if found is None:
                losses[k] = torch.inf
                continue
            _newton_step_(twin, found, slope, delta)
            losses[k] += predictive_nll(twin, batches[fold::folds])
    return _take_best(bnn, posterior, losses)


def predictive_nll(bnn: Bayesian, loader: Iterable[Any]) -> float:
    """Average −log of the predictive density of the targets over examples."""
    sums = torch.zeros(2, dtype=torch.float64)
    generator = torch.Generator(device_of(bnn.model)).manual_seed(0)
    for batch in loader:
        inputs, targets = to_device(split_batch(batch), device_of(bnn.model))
        with torch.no_grad():
            found = bnn.method.predictive(bnn, partial(_once, inputs), SAMPLES, "auto", generator)
        assert found is not None
        if found.kind == "classes":
            assert found.probs is not None
            known = targets != ignored_class(bnn.likelihood)
            classes = targets.masked_fill(~known, 0).long()
            log = found.probs.gather(-1, classes.unsqueeze(-1))[..., 0].log()[known]
        elif found.kind == "values":
            wanted = targets.reshape(found.mean.shape).to(found.mean)
            log = torch.distributions.Normal(found.mean, found.variance.sqrt()).log_prob(wanted)
        else:
            each = torch.stack([bnn.likelihood.log_prob(draw, targets) for draw in found.samples])
            log = each.logsumexp(0) - torch.tensor(float(len(each))).log()
        sums += torch.tensor([-float(log.double().sum()), len(targets)], dtype=torch.float64)
    sum_over_processes(sums)
    if not sums[1]:
        raise BayeslimError("The prior precision is chosen on held-out data, and the loader yielded none.")
    return float(sums[0] / sums[1])


def _once(inputs: Inputs) -> Iterator[Inputs]:
    yield inputs


def prior_mean(bnn: Bayesian) -> dict[str, float | Tensor]:
    """Look up the mean of every site's prior."""
    return {name: prior.config()["mean"] for name, prior in bnn.priors.items()}


def set_prior_(bnn: Bayesian, posterior: Gaussian, prior_precision: PriorPrecision, in_place: bool = False) -> None:
    """Keep a posterior under its new prior precision, and write that into the priors.

    A subnetwork of S of D weights has the precision δ S/D of a prior with precision δ.
    """
    bnn.state["posterior"] = posterior
    size = getattr(getattr(bnn.method, "subset", None), "size", None)
    part = 1.0 if size is None else size / bnn.sites.size
    for name, value in precisions.resolve(prior_precision, posterior.mean).items():
        std, settings = (part / value).sqrt(), bnn.priors[name].config()
        if in_place:
            settings["std"].copy_(std)
        else:
            own = std.detach().to(bnn.model.get_parameter(name))
            bnn.priors[name] = Normal(float(std) if std.numel() == 1 else own, settings["mean"])


def hold_in_tensors_(bnn: Bayesian, per: Per) -> None:
    """Write the standard deviations of the priors as tensors that `per` tunes.

    A training step captured as a CUDA graph then sees the values that `set_prior_` writes in place.
    """
    for name, prior in bnn.priors.items():
        weight, settings = bnn.model.get_parameter(name), prior.config()
        shape: tuple[int, ...] = ()
        if per in ("unit", "weight") and weight.ndim:
            row = tuple(weight.shape) if per == "weight" else (weight.shape[0], *[1] * (weight.ndim - 1))
            shape = row if weight.ndim > 1 else (1,)
        middle = torch.as_tensor(settings["std"]).double().log().mean().exp()
        bnn.priors[name] = Normal(weight.new_full(shape, float(middle)), settings["mean"])


def _under(posterior: Gaussian, delta: float) -> Gaussian | None:
    """Change the prior precision; None where it is too small for a singular curvature."""
    try:
        return posterior.with_prior_precision(delta)
    except NotPositiveDefinite:
        return None


def _take_best(bnn: Bayesian, posterior: Gaussian, losses: Tensor) -> float:
    best = GRID[int(losses.nan_to_num(torch.inf).argmin())]
    if best == max(GRID):
        warnings.warn(
            f"Of all prior precisions the largest, {best:g}, predicts held-out data best: weights hardly vary under "
            "it, and predictions are nearly those of the plain network. Use fewer weights "
            '(Laplace(subset="last-layer")), or choose the prior by tune="evidence".',
            BayeslimWarning,
            stacklevel=4,
        )
    set_prior_(bnn, posterior.with_prior_precision(best), best)
    return best


def _gradient(bnn: Bayesian, names: Iterable[str], loader: Iterable[Any]) -> Params:
    """Compute −∇ log p(D|w) at the network's weights."""
    params = {name: bnn.model.get_parameter(name).detach().clone().requires_grad_() for name in names}
    total = {name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()}
    twin = replicate(bnn.model)
    with torch.enable_grad():
        for batch in loader:
            inputs, targets = to_device(split_batch(batch), device_of(bnn.model))
            loss = -bnn.likelihood.log_prob(call(twin, inputs, params), targets).sum()
            for name, grad in zip(
                params, torch.autograd.grad(loss, list(params.values()), allow_unused=True), strict=True
            ):
                total[name] += 0 if grad is None else grad
    sum_over_processes(*total.values())
    return total


def _newton_step_(bnn: Bayesian, posterior: Gaussian, slope: Params, delta: float) -> None:
    """Move the network and the posterior's mean by one Newton step along `slope`."""
    start, centre = posterior.mean, prior_mean(bnn)
    pull = {name: slope[name] + delta * (w - torch.as_tensor(centre[name]).to(w)) for name, w in start.items()}
    step = posterior.covariance_product(pull)
    mean = {name: w - step[name].to(w.dtype) for name, w in start.items()}
    tensors = posterior.tensors() | {f"mean:{name}": value for name, value in mean.items()}
    bnn.state["posterior"] = type(posterior).restore(posterior.config(), tensors)
    with torch.no_grad():
        for name, value in mean.items():
            bnn.model.get_parameter(name).copy_(value)
