"""Links: from Gaussian outputs f(x) ~ N(m, V) to a `Prediction`, E[p(y|f)].

The links, by the name of `predict(how=...)`; "auto" (or "glm") is the first of each likelihood:

    Gaussian       "auto"                     mean m, epistemic variance V, exactly
    Poisson        "auto"                     E[eᶠ] = exp(m + v/2), exactly
    Bernoulli      "auto"                     E[σ(f)] by Gauss-Hermite quadrature
                   "probit"                   σ(κ(v) m),  κ(v) = (1 + π v / 8)^(-1/2)
    Categorical    "auto"                     E[softmax(f)] by quasi-Monte Carlo with 128 fixed points
                   "extended-probit"          p_c ∝ 1 / Σ_k exp(κ(Var[f_k − f_c]) (m_k − m_c)), with their correlations
                   "probit"                   softmax(κ(v_c) m_c), each logit on its own
                   "bridge"                   mean of the Dirichlet with the Laplace approximation N(m, V) in logits
    all            "joint"                    averages over the draws of N(m, V) in `samples`

"auto" is deterministic. On five small networks and data sets it is off the exact average by 0.002 to 0.02 in total
variation, "joint" of 32 draws by 0.004 to 0.06, the extended probit by 0.01 to 0.11, the probit by 0.01 to 0.35
(`benchmarks/laplace_links.py`). The bridge stays close to the plain network's probabilities, and is as far from the
average as they are.

Draws from N(m, V) are in `samples` in every case. For classes `aleatoric` is the expected entropy of one network under
N(m, V) (by the bridge, under its Dirichlet), and `epistemic` the rest of the prediction's entropy.

MacKay 1992 · Gibbs 1997 · Lu, Ie & Sha 2020, arXiv:2006.07584 · Hobbhahn, Kristiadi & Hennig 2022, arXiv:2003.01227 ·
Owen 1998, "Scrambling Sobol' and Niederreiter-Xing points"
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from bayeslim.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from bayeslim.likelihoods.base import binary_entropy
from bayeslim.noise import drawing_from, random_seed, standard_normal
from bayeslim.results import Prediction

LINKS = ("auto", "glm", "joint", "extended-probit", "probit", "bridge")
"""Ways to average over Gaussian outputs; "auto" and "glm" are the likelihood's own default."""

BINARY_POINTS = 32
"""Points of the Gauss-Hermite rule for binary outputs."""

CLASS_POINTS = 128
"""Points of the quasi-Monte Carlo rule for classes; a power of two, for which Sobol points are even."""

POINTS_SEED = 0
"""Seed of the scrambling of the points for classes, which are the same in every prediction."""

MAX_CLASS_NUMBERS = 2**22
"""Logits at points for classes that are held at once, unless one example has more."""

MAX_COVARIANCE_NUMBERS = 2**21
"""Numbers of covariances that are summarised at once, unless they come in larger parts."""


def summarise(
    likelihood: Likelihood,
    mean: Tensor,
    covariance: Tensor,
    samples: int,
    how: str = "auto",
    generator: torch.Generator | None = None,
) -> Prediction:
    """Turn Gaussian outputs N(m, V), (B, ...) and (B, O, O), into a prediction."""
    if how not in LINKS:
        raise ValueError(f"how must be one of {', '.join(LINKS)} for Gaussian outputs. Got {how!r}.")
    draws = joint_draws(mean, covariance, samples, generator)
    sampled = likelihood.predict(draws)
    if how == "joint":
        return sampled
    return closed_form(likelihood, mean.to(covariance.dtype), covariance, how, sampled)


def joint_draws(mean: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw from N(m, V), (S, B, ...); V may be singular.

    One set of standard normals serves all examples, as one drawn network would: it does not matter how many examples
    come together.
    """
    root = root_of(covariance)
    noise = normal_points(covariance.shape[1], samples, generator).to(root)
    spread = torch.einsum("boi,is->sbo", root, noise)
    return mean.to(spread.dtype) + spread.view(samples, *mean.shape)


def normal_points(dimensions: int, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw standard normals that cover space evenly, (dimensions, count).

    They are a scrambled Sobol sequence: each of them is a draw of the Gaussian, and averages over them converge faster
    than over independent draws.
    """
    if dimensions > SobolEngine.MAXDIM:
        return standard_normal((dimensions, count), dtype=torch.float64, generator=generator)
    with drawing_from(generator):
        seed = random_seed()
    uniform = SobolEngine(dimensions, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    points: Tensor = torch.special.ndtri(uniform + 0.5 / 2**SobolEngine.MAXBIT)  # never exactly 0
    return points.T.contiguous()


def gathered(parts: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Collect means and covariances of a few examples into larger parts."""
    waiting: list[tuple[Tensor, Tensor]] = []
    for part in parts:
        waiting.append(part)
        if sum(covariance.numel() for _, covariance in waiting) >= MAX_COVARIANCE_NUMBERS:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    means, covariances = zip(*parts, strict=True)
    return torch.cat(means), torch.cat(covariances)


def concatenate(predictions: Sequence[Prediction]) -> Prediction:
    """Join the predictions of several batches."""
    if len(predictions) == 1:
        return predictions[0]
    first = predictions[0]

    def joined(field: str, dim: int = 0) -> Any:
        parts = [getattr(p, field) for p in predictions]
        return None if parts[0] is None else torch.cat(parts, dim)

    fields = {name: joined(name) for name in ("mean", "aleatoric", "epistemic", "probs", "spread")}
    return replace(first, samples=joined("samples", 1), **fields)


@singledispatch
def closed_form(likelihood: Likelihood, mean: Tensor, covariance: Tensor, how: str, sampled: Prediction) -> Prediction:
    """Replace in `sampled` all that has a closed form under this likelihood."""
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
    is_gaussian = likelihood.mode != "heteroscedastic"
    return replace(sampled, mean=mean, aleatoric=noise, epistemic=spread, is_gaussian=is_gaussian)


@closed_form.register
def _(likelihood: Poisson, mean: Tensor, covariance: Tensor, how: str, sampled: Prediction) -> Prediction:
    _refuse(likelihood, how)
    spread = covariance.diagonal(dim1=1, dim2=2).view(mean.shape)
    rate = (mean + spread / 2).exp()
    return replace(sampled, mean=rate, aleatoric=rate, epistemic=spread.expm1() * rate.square())


@closed_form.register
def _(likelihood: Bernoulli, mean: Tensor, covariance: Tensor, how: str, sampled: Prediction) -> Prediction:
    _refuse(likelihood, how, "probit")
    variance = covariance.diagonal(dim1=1, dim2=2).view(mean.shape)
    probs, expected, spread = binary_moments(mean, variance)
    if how == "probit":
        probs = (mean * _kappa(variance)).sigmoid()
    return _probabilities(sampled, probs, binary_entropy(probs), expected, spread)


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
    probs, expected, spread = class_moments(logits, blocks)
    if how in ("probit", "extended-probit"):
        probs = extended_probit(logits, blocks) if how == "extended-probit" else probit(logits, blocks)
    probs, spread = probs.view(len(mean), *shape), spread.view(len(mean), *shape)
    return _probabilities(
        sampled, probs, torch.special.entr(probs).sum(-1), expected.view(len(mean), *shape[:-1]), spread
    )


def class_moments(logits: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute E[p], E[H(p)], Var[p] of p = softmax(f), f ~ N(m, V), by fixed points.

    They are functions of m, (..., C), and V, (..., C, C).
    """
    *shape, classes = logits.shape
    mean, root = logits.reshape(-1, classes, 1), root_of(covariance.reshape(-1, classes, classes))
    points = normal_points(classes, CLASS_POINTS, torch.Generator().manual_seed(POINTS_SEED)).to(root)
    step = max(1, MAX_CLASS_NUMBERS // (classes * CLASS_POINTS))
    found = []
    for start in range(0, len(mean), step):
        drawn = mean[start : start + step] + root[start : start + step] @ points
        drawn -= drawn.amax(1, keepdim=True)
        probs = drawn.exp()
        total = probs.sum(1, keepdim=True)
        probs /= total
        entropy = (total.log().squeeze(1) - (probs * drawn).sum(1)).mean(-1)  # −Σ p log p
        found.append((probs.mean(-1), entropy, probs.var(-1, correction=0)))
    expected, entropy, spread = (torch.cat(parts) for parts in zip(*found, strict=True))
    return expected.view(*shape, classes), entropy.view(shape), spread.view(*shape, classes)


def binary_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute E[p], E[H(p)], Var[p] of p = σ(f), f ~ N(m, v), by quadrature."""
    points, weights = np.polynomial.hermite_e.hermegauss(BINARY_POINTS)
    std = variance.sqrt()
    probability, square, entropy = (torch.zeros_like(mean) for _ in range(3))
    for point, weight in zip(points.tolist(), (weights / weights.sum()).tolist(), strict=True):
        p = torch.add(mean, std, alpha=point).sigmoid()
        probability += weight * p
        square += weight * p.square()
        entropy += weight * binary_entropy(p)
    return probability, entropy, (square - probability.square()).clamp_min(0)


def probit(logits: Tensor, covariance: Tensor) -> Tensor:
    """Compute softmax(κ(v_c) m_c), each logit shrunk by its own variance, (..., C)."""
    return (logits * _kappa(covariance.diagonal(dim1=-2, dim2=-1))).softmax(-1)


def extended_probit(logits: Tensor, covariance: Tensor) -> Tensor:
    """Compute p_c ∝ 1 / Σ_k exp(κ(Var[f_k − f_c]) (m_k − m_c)), (..., C).

    It compares every pair of classes and counts correlations. As for a softmax, a number added to all logits of an
    example changes nothing.
    """
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    between = (variance.unsqueeze(-1) + variance.unsqueeze(-2) - 2 * covariance).clamp(min=0)
    ahead = (logits.unsqueeze(-2) - logits.unsqueeze(-1)) * _kappa(between)
    return (-ahead.logsumexp(-1)).softmax(-1)


def dirichlet(logits: Tensor, covariance: Tensor) -> Tensor:
    """Compute α, (..., C), of a Dirichlet with logits near N(m, V), the bridge.

    A Dirichlet lives where logits sum to zero, so N(m, V) is conditioned on that first:
        α_c = (1 − 2/C + e^{m_c} / C² Σ_k e^{−m_k}) / v_c.
    It gives a whole distribution over probabilities, and is exact for logits with a Dirichlet's own covariance. Where
    variances differ much from that, its mean is biased towards the class with the least variance.
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


def _probabilities(
    sampled: Prediction, probs: Tensor, entropy: Tensor, expected: Tensor, spread: Tensor | None
) -> Prediction:
    """Put in probabilities of this entropy, and the expected entropy of one network."""
    aleatoric = expected.to(entropy).minimum(entropy)  # an approximation may have less entropy in all
    epistemic = entropy - aleatoric
    return replace(sampled, mean=probs, aleatoric=aleatoric, epistemic=epistemic, probs=probs, spread=spread)


def dirichlet_prediction(sampled: Prediction, alpha: Tensor) -> Prediction:
    """Predict from Dirichlet concentrations α, (B, ..., C); draws are in `sampled`."""
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


def root_of(covariance: Tensor, least_jitter: float = 0.0) -> Tensor:
    """Compute a root of each matrix, (..., R, R); by eigenvectors if Cholesky fails."""
    tiny = 1e-6 if covariance.dtype == torch.float32 else 1e-12
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    jitter = (tiny * diagonal.mean(-1, keepdim=True)).clamp(min=least_jitter)
    root: Tensor
    root, info = torch.linalg.cholesky_ex(covariance + torch.diag_embed(jitter.expand(diagonal.shape)))
    if bool(info.any()):
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    return root
