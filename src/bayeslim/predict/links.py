"""Predictions from Gaussian outputs: f(x) ~ N(m, V) becomes a `Prediction`.

Closed forms of E[p(y|f)], by the name of `predict(how=...)`:

    Gaussian                                  mean m, epistemic variance V, exactly
    Poisson                                   E[eᶠ] = exp(m + v/2), exactly
    Bernoulli      "probit"                   σ(κ(v) m),  κ(v) = (1 + π v / 8)^(-1/2)
    Categorical    "probit"                   softmax(κ(v_c) m_c), each logit on its own
                   "extended-probit"          p_c ∝ 1 / Σ_k exp(κ(Var[f_k − f_c]) (m_k − m_c)), with their correlations
                   "bridge"                   mean of the Dirichlet with the Laplace approximation N(m, V) in logits
    all            "joint"                    averages over draws of the outputs

Draws from N(m, V) are in `samples` in every case. The mutual information between target and weights has no closed form
for classes: it is taken from the draws, except by the bridge, whose Dirichlet has one.

MacKay 1992 · Gibbs 1997 · Lu, Ie & Sha 2020, arXiv:2006.07584 · Hobbhahn, Kristiadi & Hennig 2022, arXiv:2003.01227
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import singledispatch

import torch
from torch import Tensor

from bayeslim.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from bayeslim.noise import standard_normal
from bayeslim.results import Prediction

LINKS = ("auto", "glm", "probit", "extended-probit", "bridge", "joint")
"""Ways to average over Gaussian outputs; "auto" and "glm" are the likelihood's own default."""

TOGETHER = 2**21
"""How many numbers of covariances are summarised at once, unless they come in larger parts."""


def summarise(
    likelihood: Likelihood,
    mean: Tensor,
    covariance: Tensor,
    samples: int,
    how: str = "auto",
    generator: torch.Generator | None = None,
) -> Prediction:
    """The prediction from Gaussian outputs.

    Args:
        likelihood: what the outputs mean.
        mean: m, (B, ...).
        covariance: V, (B, O, O), over the flattened outputs of each example.
        samples: draws of the outputs, S.
        how: one of `LINKS`.
        generator: where the draws come from.
    """
    if how not in LINKS:
        raise ValueError(f"how must be one of {', '.join(LINKS)} for Gaussian outputs. Got {how!r}.")
    draws = joint_draws(mean, covariance, samples, generator)
    sampled = likelihood.predict(draws)
    if how == "joint":
        return sampled
    return closed_form(likelihood, mean.to(covariance.dtype), covariance, how, sampled)


def joint_draws(mean: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draws of N(m, V), (S, B, ...); V may be singular."""
    root = _root(covariance)
    shape = (samples, *covariance.shape[:2])
    noise = standard_normal(shape, dtype=covariance.dtype, device=covariance.device, generator=generator)
    spread = torch.einsum("boi,sbi->sbo", root, noise)
    return mean.to(spread.dtype) + spread.view(samples, *mean.shape)


def gathered(parts: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Means and covariances of a few examples at a time, put together to as many as are worth a summary."""
    waiting: list[tuple[Tensor, Tensor]] = []
    for part in parts:
        waiting.append(part)
        if sum(covariance.numel() for _, covariance in waiting) >= TOGETHER:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    means, covariances = zip(*parts, strict=True)
    return torch.cat(means), torch.cat(covariances)


def concatenate(predictions: Sequence[Prediction]) -> Prediction:
    """One prediction from those of several batches."""
    if len(predictions) == 1:
        return predictions[0]
    first = predictions[0]

    def joined(field: str, dim: int = 0) -> Tensor:
        return torch.cat([getattr(p, field) for p in predictions], dim)

    return Prediction(
        kind=first.kind,
        mean=joined("mean"),
        samples=joined("samples", 1),
        aleatoric=joined("aleatoric"),
        epistemic=joined("epistemic"),
        probs=None if first.probs is None else joined("probs"),
        spread=None if first.spread is None else joined("spread"),
    )


@singledispatch
def closed_form(likelihood: Likelihood, mean: Tensor, covariance: Tensor, how: str, sampled: Prediction) -> Prediction:
    """`sampled` with whatever has a closed form under this likelihood; nothing, for one that is not known."""
    _refuse(likelihood, how)
    return sampled


@closed_form.register
def _(likelihood: Gaussian, mean: Tensor, covariance: Tensor, how: str, sampled: Prediction) -> Prediction:
    _refuse(likelihood, how)
    spread = covariance.diagonal(dim1=1, dim2=2).view(mean.shape)
    if likelihood.mode == "heteroscedastic":
        mean, log_variance = mean.chunk(2, -1)
        spread, spread_of_log = spread.chunk(2, -1)
        noise = (log_variance + spread_of_log / 2).exp()
    else:
        noise = (2 * likelihood.log_noise.to(mean)).exp().expand(mean.shape)
    return replace(sampled, mean=mean, aleatoric=noise, epistemic=spread)


@closed_form.register
def _(likelihood: Poisson, mean: Tensor, covariance: Tensor, how: str, sampled: Prediction) -> Prediction:
    _refuse(likelihood, how)
    spread = covariance.diagonal(dim1=1, dim2=2).view(mean.shape)
    rate = (mean + spread / 2).exp()
    return replace(sampled, mean=rate, aleatoric=rate, epistemic=spread.expm1() * rate.square())


@closed_form.register
def _(likelihood: Bernoulli, mean: Tensor, covariance: Tensor, how: str, sampled: Prediction) -> Prediction:
    _refuse(likelihood, how, "probit")
    probs = (mean * _kappa(covariance.diagonal(dim1=1, dim2=2).view(mean.shape))).sigmoid()
    return _probabilities(sampled, probs, torch.special.entr(probs) + torch.special.entr(1 - probs))


@closed_form.register
def _(likelihood: Categorical, mean: Tensor, covariance: Tensor, how: str, sampled: Prediction) -> Prediction:
    places = torch.arange(mean[0].numel(), device=mean.device).view(1, *mean.shape[1:])
    places = places.movedim(likelihood.class_dim, -1)[0]
    shape, places = places.shape, places.reshape(-1, places.shape[-1])
    logits = mean.flatten(1)[:, places]  # (B, positions, C)
    blocks = covariance[:, places[:, :, None], places[:, None, :]]
    if how == "bridge":
        alpha = dirichlet(logits, blocks).view(len(mean), *shape)
        return dirichlet_prediction(sampled, alpha)
    probs = extended_probit(logits, blocks) if how == "extended-probit" else probit(logits, blocks)
    probs = probs.view(len(mean), *shape)
    return _probabilities(sampled, probs, torch.special.entr(probs).sum(-1))


def probit(logits: Tensor, covariance: Tensor) -> Tensor:
    """softmax(κ(v_c) m_c), each logit shrunk by its own variance, (..., C)."""
    return (logits * _kappa(covariance.diagonal(dim1=-2, dim2=-1))).softmax(-1)


def extended_probit(logits: Tensor, covariance: Tensor) -> Tensor:
    """p_c ∝ 1 / Σ_k exp(κ(Var[f_k − f_c]) (m_k − m_c)): every pair of classes compared, correlations counted.

    What all logits have in common does not matter, as it does not for a softmax.
    """
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    between = (variance.unsqueeze(-1) + variance.unsqueeze(-2) - 2 * covariance).clamp(min=0)
    ahead = (logits.unsqueeze(-2) - logits.unsqueeze(-1)) * _kappa(between)
    return (-ahead.logsumexp(-1)).softmax(-1)


def dirichlet(logits: Tensor, covariance: Tensor) -> Tensor:
    """The Laplace bridge: α of the Dirichlet whose logits are nearly N(m, V), (..., C).

    A Dirichlet lives where logits sum to zero, so N(m, V) is conditioned on that first:
        α_c = (1 − 2/C + e^{m_c} / C² Σ_k e^{−m_k}) / v_c.
    It gives a whole distribution over probabilities, and is exact for logits with a Dirichlet's own covariance. Where
    variances differ from that a lot, its mean is off, as no other link's is: a class with little variance gains.
    """
    row = covariance.sum(-1)
    total = row.sum(-1, keepdim=True)
    share = torch.where(total > 0, row / total, 1 / logits.shape[-1])
    logits = logits - share * logits.sum(-1, keepdim=True)
    variance = (covariance.diagonal(dim1=-2, dim2=-1) - share * row).clamp(min=torch.finfo(row.dtype).tiny)
    classes = logits.shape[-1]
    ratio = (logits + torch.logsumexp(-logits, -1, keepdim=True)).exp() / classes**2
    return (1 - 2 / classes + ratio) / variance


def _kappa(variance: Tensor) -> Tensor:
    return (1 + math.pi / 8 * variance).rsqrt()


def _probabilities(sampled: Prediction, probs: Tensor, entropy: Tensor) -> Prediction:
    """Closed-form probabilities, with the draws' mutual information as the epistemic part of their entropy."""
    epistemic = sampled.epistemic.to(entropy).minimum(entropy)
    return replace(sampled, mean=probs, aleatoric=entropy - epistemic, epistemic=epistemic, probs=probs)


def dirichlet_prediction(sampled: Prediction, alpha: Tensor) -> Prediction:
    """Summarise a Dirichlet over class probabilities; draws of it are in `sampled`."""
    total = alpha.sum(-1, keepdim=True)
    probs = alpha / total
    entropy = torch.special.entr(probs).sum(-1)
    expected = (probs * (torch.digamma(total + 1) - torch.digamma(alpha + 1))).sum(-1)
    spread = probs * (1 - probs) / (total + 1)
    epistemic = (entropy - expected).clamp_min(0)
    return replace(sampled, mean=probs, aleatoric=expected, epistemic=epistemic, probs=probs, spread=spread)


def _refuse(likelihood: Likelihood, how: str, *known: str) -> None:
    if how not in ("auto", "glm", *known):
        ways = ", ".join(f'"{way}"' for way in ("glm", *known, "joint"))
        raise ValueError(f"how={how!r} is for categorical outputs. A {likelihood.name} likelihood has {ways}.")


def _root(covariance: Tensor) -> Tensor:
    """A square root of each V: Cholesky's where rounding allows, else the eigenvectors'."""
    tiny = 1e-6 if covariance.dtype == torch.float32 else 1e-12
    jitter = tiny * covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None].expand(covariance.shape[:2])
    root: Tensor
    root, info = torch.linalg.cholesky_ex(covariance + torch.diag_embed(jitter))
    if bool(info.any()):
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    return root
