"""What a student is told of a teacher's prediction, and how far its own outputs are from that.

The teacher's predictive distribution p(y|x) = E_q[p(y|x, w)] is told by its mean (probabilities, rates) or its mean and
variance, and the student's q(y|x) follows it in

    KL(p ‖ q)      classes, yes/no targets and counts
    KL(N(m, v) ‖ N(μ, s))      values, for a student with outputs for μ and log s; (m − μ)² / 2v for one with only μ

A temperature T softens the probabilities of both, p^(1/T) / Z, so that small ones are heard, and the divergence is
multiplied by T² to keep its gradients' size. Whatever T is, q = p is the optimum.

A Dirichlet student is told E_s[log p_s], which is all that the likelihood of a Dirichlet sees of probabilities p_s:

    −E_s[log Dir(p_s | α)] = Σ_c log Γ(α_c) − log Γ(Σ_c α_c) − Σ_c (α_c − 1) E_s[log p_sc],      α = exp(outputs)

Hinton, Vinyals & Dean 2015, arXiv:1503.02531 · Malinin, Mlodozeniec & Gales 2020, arXiv:1905.00076
"""

from __future__ import annotations

from functools import singledispatch

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from bayeslim.results import Prediction

SMOOTHING = 1e-4
"""The share of uniform noise in what a Dirichlet student is told; the log of a zero would be all it hears."""


def told(prediction: Prediction) -> Tensor:
    """The mean of a prediction, (B, ...); for values mean and variance, (B, 2, ...)."""
    if prediction.kind != "values":
        return prediction.mean
    return torch.stack([prediction.mean, prediction.variance], 1)


def told_of_probabilities(likelihood: Categorical, outputs: Tensor) -> Tensor:
    """E_s[log p_s] of the teacher's raw outputs (S, B, ...), classes last, (B, ..., C)."""
    where = likelihood.class_dim + 1 if likelihood.class_dim >= 0 else likelihood.class_dim
    probs = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).movedim(where, -1).softmax(-1)
    return ((1 - SMOOTHING) * probs + SMOOTHING / probs.shape[-1]).log().mean(0)


@singledispatch
def divergence(likelihood: Likelihood, outputs: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """How far a student's outputs are from what it was `told`, for each example, (B,).

    Args:
        likelihood: what the student's outputs mean; register a likelihood's type to teach it.
        outputs: the student's, (B, ...).
        teacher: what it was told.
        temperature: of probabilities.
    """
    raise UnsupportedModel(f"No student can learn from a {likelihood.name} likelihood: what it is told is not known.")


@divergence.register
def _(likelihood: Categorical, outputs: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    logits = _like(outputs.movedim(likelihood.class_dim, -1), teacher)
    soft = (_log(teacher) / temperature).log_softmax(-1)
    return temperature**2 * _summed(soft.exp() * (soft - (logits / temperature).log_softmax(-1)))


@divergence.register
def _(likelihood: Bernoulli, outputs: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    logits = _like(outputs, teacher) / temperature
    soft = (_log(teacher) - _log(1 - teacher)) / temperature
    yes, no = F.logsigmoid(soft), F.logsigmoid(-soft)
    each = yes.exp() * (yes - F.logsigmoid(logits)) + no.exp() * (no - F.logsigmoid(-logits))
    return temperature**2 * _summed(each)


@divergence.register
def _(likelihood: Poisson, outputs: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    log_rate = _like(outputs, teacher)
    return _summed(teacher * (_log(teacher) - log_rate) - teacher + log_rate.exp())


@divergence.register
def _(likelihood: Gaussian, outputs: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    mean, variance = teacher.unbind(1)
    if likelihood.mode != "heteroscedastic":
        return _summed((_like(outputs, mean) - mean).square() / (2 * variance))
    own, log_variance = outputs.to(teacher.dtype).chunk(2, -1)
    squares = variance + (_like(own, mean) - mean).square()
    return _summed(0.5 * (log_variance - variance.log() + squares * torch.exp(-log_variance) - 1))


def dirichlet_divergence(likelihood: Categorical, outputs: Tensor, teacher: Tensor) -> Tensor:
    """−E_s[log Dir(p_s | exp(outputs))] of each example, from E_s[log p_s], (B,)."""
    # In double precision: for large α the logarithms of the gamma function are large and nearly cancel.
    alpha = _like(outputs.movedim(likelihood.class_dim, -1), teacher).double().exp()
    log_normaliser = torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha.sum(-1))
    fit = ((alpha - 1) * teacher.double()).sum(-1)
    return _summed((log_normaliser - fit).unsqueeze(-1)).to(teacher.dtype)


def _log(values: Tensor) -> Tensor:
    return values.clamp_min(torch.finfo(values.dtype).tiny).log()


def _summed(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1) if values.ndim > 1 else values


def _like(outputs: Tensor, teacher: Tensor) -> Tensor:
    """The outputs, if they are as many as the teacher's, in the precision of what is told."""
    if outputs.shape != teacher.shape:
        raise ShapeMismatch(
            f"The student's outputs, {tuple(outputs.shape)}, do not match what the teacher says, "
            f"{tuple(teacher.shape)}. A student learns from bl.distill(teacher, loader, student), with as many outputs "
            "as the teacher has."
        )
    return outputs.to(teacher.dtype)
