"""Divergences between a teacher's prediction and a student's outputs.

The targets are the mean of the teacher's predictive distribution p(y|x) = E_q[p(y|x, w)] (probabilities, rates), or its
mean and variance. The student's q(y|x) minimises

    KL(p ‖ q)      classes, yes/no targets and counts
    KL(N(m, v) ‖ N(μ, s))      values, for a student with outputs for μ and log s; (m − μ)² / 2v for one with only μ

A temperature T softens the probabilities of both, p^(1/T) / Z, so that small ones count more; the divergence is
multiplied by T² to keep the size of its gradients. The optimum is q = p for every T.

The targets of a Dirichlet student are E_s[log p_s], the sufficient statistic of probabilities p_s under a Dirichlet:

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
"""The share of a uniform distribution in the targets of a Dirichlet student; the log of a zero would dominate them."""


def targets_of(prediction: Prediction) -> Tensor:
    """Return a prediction's mean, (B, ...); for values mean and variance, (B, 2, ...)."""
    if prediction.kind != "values":
        return prediction.mean
    return torch.stack([prediction.mean, prediction.variance], 1)


def dirichlet_targets(likelihood: Categorical, outputs: Tensor) -> Tensor:
    """Compute E_s[log p_s], (B, ..., C), from raw outputs (S, B, ...)."""
    where = likelihood.class_dim + 1 if likelihood.class_dim >= 0 else likelihood.class_dim
    probs = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).movedim(where, -1).softmax(-1)
    return ((1 - SMOOTHING) * probs + SMOOTHING / probs.shape[-1]).log().mean(0)


@singledispatch
def divergence(likelihood: Likelihood, outputs: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the divergence (B,) of a student's outputs from its targets.

    Args:
        likelihood: the student's likelihood; register a type of likelihood to support it.
        outputs: the student's outputs, (B, ...).
        teacher: the targets, as `targets_of` gives them.
        temperature: the temperature of probabilities.
    """
    raise UnsupportedModel(
        f"Distillation knows no divergence for a {likelihood.name} likelihood. Register one with "
        "bayeslim.distill.divergences.divergence.register."
    )


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
    """Compute −E_s[log Dir(p_s | exp(outputs))] (B,) from E_s[log p_s]."""
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
    """Convert outputs to the targets' precision; raise if their shapes differ."""
    if outputs.shape != teacher.shape:
        raise ShapeMismatch(
            f"The student's outputs, {tuple(outputs.shape)}, do not match its targets, "
            f"{tuple(teacher.shape)}. A student learns from bl.distill(teacher, loader, student), with as many outputs "
            "as the teacher has."
        )
    return outputs.to(teacher.dtype)
