"""The marginal likelihood of a Laplace approximation, and the prior precision and noise that maximise it.

    log p(D) ≈ log p(D|w*) + log p(w*) + n/2 log 2π − ½ log|P|
             = log p(D|w*) + ½ Σ [log δ_i − δ_i (w*_i − m_i)²] − ½ log|H + δ|        over the n random weights

for a Normal prior N(m, 1/δ) and the curvature H of −log p(D|w) at w*. The curvature of a Gaussian likelihood is
proportional to 1/σ², so that the evidence of another noise σ needs no new pass over the data:
    log|s H + δ| = n log s + log|H + δ/s|        s = σ₀²/σ².

MacKay 1992 · Immer et al. 2021, arXiv:2104.04975
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.curvature.sweep import sum_over_processes
from bayeslim.likelihoods import Gaussian as GaussianLikelihood
from bayeslim.likelihoods import Likelihood
from bayeslim.posteriors import Conditioned, Dense, Gaussian, Kronecker, LowRank
from bayeslim.posteriors import prior_precision as precisions
from bayeslim.posteriors.factor import Factor
from bayeslim.posteriors.prior_precision import PriorPrecision
from bayeslim.replica import replicate
from bayeslim.types import call, device_of, split_batch, to_device

MAX_LOG = 25.0
"""Logarithms of precisions and noises stay between −25 and 25: the evidence may rise without a maximum."""


@dataclass(frozen=True)
class DataTerm:
    """Log p(D|w*).

    Attributes:
        value: its value.
        examples: how many examples.
        targets: how many numbers the network had to predict, for the noise of a Gaussian likelihood.
    """

    value: float
    examples: int
    targets: int


@dataclass(frozen=True)
class Tuned:
    """The maximum of the evidence.

    Attributes:
        prior_precision: one number, or one a layer.
        noise: the standard deviation of a Gaussian likelihood, or None where it was not tuned.
        log_evidence: the evidence there.
        posterior: the posterior there.
    """

    prior_precision: PriorPrecision
    noise: float | None
    log_evidence: float
    posterior: Gaussian


def data_term(model: nn.Module, likelihood: Likelihood, loader: Iterable[Any]) -> DataTerm:
    """Sum log p(y|x, w*) over a loader, and over processes, in evaluation mode."""
    device, twin = device_of(model), replicate(model)
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for batch in loader:
            inputs, wanted = to_device(split_batch(batch), device)
            outputs = call(twin, inputs)
            each = likelihood.log_prob(outputs, wanted)
            sums += torch.tensor([float(each.double().sum()), len(each), outputs.numel()], dtype=torch.float64)
    sum_over_processes(sums)
    return DataTerm(float(sums[0]), int(sums[1]), int(sums[2]))


def log_marginal_likelihood(
    log_likelihood: Tensor | float,
    posterior: Gaussian,
    prior_mean: Mapping[str, float | Tensor],
    scale: Tensor | float = 1.0,
) -> Tensor:
    """Compute the Laplace evidence around w*, differentiable in the prior precision.

    `scale` is s, a factor on the curvature.
    """
    prior = random_prior(posterior)
    random = {name: mask for name, mask in posterior.support.items() if bool(mask.any())}
    delta = precisions.diagonal(precisions.resolve(prior, posterior.mean), posterior.mean, _double(posterior))
    fit: Tensor = torch.zeros((), dtype=torch.float64)
    count = 0
    for name, mask in random.items():
        off = (posterior.mean[name].double() - torch.as_tensor(prior_mean[name]).to(delta[name])).square()
        own = delta[name]
        fit = fit + (own.log() - own * off)[mask].sum().cpu()
        count += int(mask.sum())
    if isinstance(scale, Tensor) or scale != 1.0:
        log_det = posterior.with_prior_precision(_divided(prior, scale)).log_det_precision() + count * _log(scale)
    else:
        log_det = posterior.log_det_precision()
    return log_likelihood + 0.5 * (fit - log_det.cpu())


def maximise(
    posterior: Gaussian,
    prior_mean: Mapping[str, float | Tensor],
    data: DataTerm,
    *,
    per_layer: bool = False,
    likelihood: Likelihood | None = None,
) -> Tuned:
    """Find the prior precision with the largest evidence, by L-BFGS in its logarithm.

    Args:
        posterior: whose precision is replaced.
        prior_mean: the prior's centre by parameter name.
        data: log p(D|w*).
        per_layer: whether each layer gets a precision of its own.
        likelihood: a Gaussian one with a learned noise has that tuned too.
    """
    start = _log_precisions(posterior, per_layer)
    free = torch.cat([torch.stack(list(start.values())), torch.zeros(1, dtype=torch.float64)]).requires_grad_()
    old: Tensor | None = None  # log σ₀
    if isinstance(likelihood, GaussianLikelihood) and likelihood.mode == "learned":
        old = likelihood.log_noise.detach().double().cpu()

    def settings() -> tuple[PriorPrecision, Tensor | float, Tensor | float]:
        log = free.clamp(-MAX_LOG, MAX_LOG)
        delta: PriorPrecision = dict(zip(start, log[:-1].exp(), strict=True)) if per_layer else log[0].exp()
        if old is None:
            return delta, 1.0, data.value
        change = log[-1]  # log σ/σ₀
        scale, half_log = torch.exp(-2 * change), 0.5 * math.log(2 * math.pi)
        misfit = -data.value - data.targets * (old + half_log)  # Σ (y − f)² / 2σ₀²
        return delta, scale, -misfit * scale - data.targets * (old + change + half_log)

    def evidence() -> Tensor:
        delta, scale, fitted = settings()
        return log_marginal_likelihood(fitted, posterior.with_prior_precision(delta), prior_mean, scale)

    optimizer = torch.optim.LBFGS([free], max_iter=50, tolerance_change=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        # in units of a target, so that the tolerances mean the same for small and large data
        loss = -evidence() / max(1, data.targets)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    with torch.no_grad():
        delta, scale, _ = settings()
        best = float(evidence())
    found = scaled(posterior, float(scale)).with_prior_precision(_plain(delta))
    noise = None if old is None else math.exp(float(old)) / math.sqrt(float(scale))
    return Tuned(_plain(delta), noise, best, found)


@singledispatch
def scaled(posterior: Gaussian, factor: float) -> Gaussian:
    """Multiply a posterior's curvature, but not its prior precision."""
    raise TypeError(f"The curvature of a {type(posterior).__name__} posterior cannot be rescaled.")


@scaled.register
def _(posterior: Kronecker, factor: float) -> Kronecker:
    layers = [
        replace(
            f,
            outputs=Factor(f.outputs.values * factor, f.outputs.vectors),
            corrected=None if f.corrected is None else f.corrected * factor,
        )
        for f in posterior.factors
    ]
    rest = {name: value * factor for name, value in posterior.rest_curvature.items()}
    return Kronecker(posterior.mean, layers, posterior.prior_precision, rest=rest, damping=posterior.damping)


@scaled.register
def _(posterior: Dense, factor: float) -> Dense:
    curvature = posterior.curvature * factor
    return Dense(posterior.mean, curvature, posterior.prior_precision, indices=posterior.indices)


@scaled.register
def _(posterior: LowRank, factor: float) -> LowRank:
    return LowRank(posterior.mean, posterior.factor, posterior.eigenvalues * factor, posterior.prior_precision)


@scaled.register
def _(posterior: Conditioned, factor: float) -> Conditioned:
    return Conditioned(scaled(posterior.base, factor), posterior.masks, posterior.mean, posterior.solver)


def random_prior(posterior: Gaussian) -> PriorPrecision:
    """Look up the prior precision that a posterior was made with."""
    base = posterior.base if isinstance(posterior, Conditioned) else posterior
    found: PriorPrecision = base.prior_precision  # type: ignore[attr-defined]
    return found


def _log_precisions(posterior: Gaussian, per_layer: bool) -> dict[str, Tensor]:
    """Average the logarithms of the present precisions, over all or by layer."""
    resolved = precisions.resolve(random_prior(posterior), posterior.mean)
    full = precisions.diagonal(resolved, posterior.mean, _double(posterior))
    logs: dict[str, list[Tensor]] = {}
    for name, value in full.items():
        logs.setdefault(name.rpartition(".")[0] if per_layer else "", []).append(value.detach().log().flatten().cpu())
    return {key: torch.cat(parts).mean().clamp(-MAX_LOG, MAX_LOG) for key, parts in logs.items()}


def _divided(prior: PriorPrecision, scale: Tensor | float) -> PriorPrecision:
    if isinstance(prior, Mapping):
        return {name: value / scale for name, value in prior.items()}
    return prior / scale


def _plain(prior: PriorPrecision) -> PriorPrecision:
    if isinstance(prior, Mapping):
        return {name: float(value) for name, value in prior.items()}
    return float(prior)


def _log(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).log()


def _double(posterior: Gaussian) -> Tensor:
    """Make an empty float64 tensor on the posterior's device."""
    first = next(iter(posterior.mean.values()))
    return torch.empty((), dtype=torch.float64, device=first.device)
