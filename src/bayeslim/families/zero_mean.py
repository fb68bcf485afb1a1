"""Variance networks: weights with mean zero, whose variances carry the information.

    q(w) = Π N(wᵢ | 0, σᵢ²),      y | x ~ N(0, f(x²; σ²))  at the pre-activations of a linear layer

A unit tells the next layer how large it is, never its sign. The layer's mean network is constant, so that it predicts
at the level of chance, and only draws of the weights predict. `priors.LogUniform` and `priors.RelevanceDetermination`
have no KL left at μ = 0 (α = σ²/μ² is infinite), so there training is by maximum likelihood alone. Mean-field
posteriors under such priors, trained with their means, can end here by themselves.

Neklyudov, Molchanov, Ashukha & Vetrov 2019, arXiv:1803.03764
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from bayeslim.families.base import add_parameter, precise_dtype
from bayeslim.families.diagonal import DiagonalGaussian
from bayeslim.io.registry import register
from bayeslim.posteriors import ZeroMeanDiagonal

MIN_INITIAL_STD = 1e-6
"""The initial σ of weights that are zero or nearly so: its logarithm has to be finite."""


@register("family")
@dataclass(frozen=True)
class ZeroMean(DiagonalGaussian):
    """Independent Gaussians around zero, wᵢ ~ N(0, σᵢ²), trained in log σ alone.

    The network's own weights are set to zero and are not trained. Predict with draws, `bl.predict(bnn, x, samples=32)`:
    the mean network predicts nothing. Leave the last layer out of `sites` to train it as usual, which gives sharper
    probabilities: a class whose logit has mean zero has a negative logit half of the time. With nothing but log σ to
    train, a layer learns slowly at the usual rate: `Variational(ZeroMean(), std_rate=20.0)` works well.

    Criteria that need a signal in the means cannot rank such weights. "density", the default, "mass" and
    "savage_dickey" rank them by σ.

    Attributes:
        initial_std: the initial σ of every weight. By default it is |w|, the size of the network's own weight, which
            has the scale of the layer and differs from unit to unit. Units with equal spreads would learn the same.
    """

    initial_std: float | None = None
    name: ClassVar[str] = "zero_mean"

    def register(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Add log σ to every parameter's module, and fix the parameter at zero."""
        for name in names:
            mean = model.get_parameter(name)
            with torch.no_grad():
                size = mean.to(precise_dtype(mean), copy=True)
                std = size.abs() if self.initial_std is None else size.fill_(self.initial_std)
                mean.zero_()
            add_parameter(model, name + self.suffix, std.clamp(min=MIN_INITIAL_STD).log())
            mean.requires_grad_(False)

    def strip(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Remove log σ, and let the parameters train again."""
        super().strip(model, names)
        for name in names:
            model.get_parameter(name).requires_grad_(True)

    def posterior(self, model: nn.Module, names: tuple[str, ...]) -> ZeroMeanDiagonal:
        """Build the posterior at the present parameters, as data."""
        found = super().posterior(model, names)
        return ZeroMeanDiagonal(found.mean, found.std)
