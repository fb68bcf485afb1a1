"""Automatic relevance determination: a Normal prior for every weight, with the variance that suits the posterior best.

    p(w) = Π N(wᵢ | 0, τᵢ²),      τᵢ² = argmin KL(N(μᵢ, σᵢ²) ‖ N(0, τ²)) = μᵢ² + σᵢ²
    KL = ½ log(1 + μ²/σ²) = ½ log(1 + 1/α),      α = σ²/μ²

Weights that the data do not need get τ → 0, and log α grows with nothing in its way: a prior of sparsity, as the
log-uniform one is, of whose KL this is the lower bound (`log_uniform.py`). The scales have been maximised over, one for
each weight, so the bound on the evidence that the loss reads like is none: there is no evidence under it.

MacKay 1995, "Probable networks and plausible predictions" · Kharitonov, Molchanov & Vetrov 2018, arXiv:1811.00596,
"Variational dropout via empirical Bayes"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayeslim.errors import ImproperPrior
from bayeslim.io.registry import register
from bayeslim.priors.base import Prior
from bayeslim.priors.log_alpha import divergence, relevance


@register("prior")
@dataclass(frozen=True)
class RelevanceDetermination(Prior):
    """N(0, τ²) with a τ for every weight, always at its optimum: empirical Bayes, so there is no evidence under it.

    For Gaussian families, which have a mean and a spread of every weight to fit τ to; a weight alone has no density.
    """

    name: ClassVar[str] = "relevance_determination"
    is_proper: ClassVar[bool] = False
    is_one_for_all: ClassVar[bool] = True

    def log_prob(self, weight: Tensor) -> Tensor:
        """There is none of a weight alone."""
        raise ImproperPrior(
            "RelevanceDetermination fits a scale to the mean and the spread of every weight, so a weight by itself has "
            "no density under it. Use it with a Gaussian family at renyi=1, or priors.LogUniform()."
        )

    def kl(self, mean: Tensor, std: Tensor, log_std: Tensor | None = None) -> Tensor:
        """½ Σ log(1 + μ²/σ²)."""
        return divergence(relevance, mean, std.log() if log_std is None else log_std)

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """There is nothing to draw from."""
        raise ImproperPrior(
            "RelevanceDetermination has scales that only a posterior says, so there are no draws from it. "
            "Use priors.Normal(std)."
        )
