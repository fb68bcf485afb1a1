"""Automatic relevance determination: a Normal prior of optimal scale per weight.

    p(w) = Π N(wᵢ | 0, τᵢ²),      τᵢ² = argmin KL(N(μᵢ, σᵢ²) ‖ N(0, τ²)) = μᵢ² + σᵢ²
    KL = ½ log(1 + μ²/σ²) = ½ log(1 + 1/α),      α = σ²/μ²

Weights that the data do not need get τ → 0, and their log α grows without a bound. Like the log-uniform prior this
leads to sparsity; its KL is the lower bound of the log-uniform prior's (`log_uniform.py`). The loss is not a bound on
the evidence, because one scale per weight has been maximised over: there is no evidence under this prior.

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
    """N(0, τ²) with an optimal τ for every weight: empirical Bayes.

    There is no evidence under it.

    It needs a Gaussian family, to whose means and standard deviations τ is fitted; a weight alone has no density.
    """

    name: ClassVar[str] = "relevance_determination"
    is_proper: ClassVar[bool] = False
    is_one_for_all: ClassVar[bool] = True

    def log_prob(self, weight: Tensor) -> Tensor:
        """Raise an `ImproperPrior`: a weight alone has no density."""
        raise ImproperPrior(
            "RelevanceDetermination fits a scale to the mean and the spread of every weight, so a weight by itself has "
            "no density under it. Use it with a Gaussian family at renyi=1, or priors.LogUniform()."
        )

    def kl(self, mean: Tensor, std: Tensor, log_std: Tensor | None = None) -> Tensor:
        """Compute ½ Σ log(1 + μ²/σ²)."""
        return divergence(relevance, mean, std.log() if log_std is None else log_std)

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Raise an `ImproperPrior`: there is nothing to draw from."""
        raise ImproperPrior(
            "The scales of RelevanceDetermination depend on a posterior, so there are no draws from it. "
            "Use priors.Normal(std)."
        )
