"""Several modes: a mixture of Gaussians over all random parameters *together*.

    q(w) = Σ_c π_c Π_i N(wᵢ | μ_ci, σ_ci²)

One component is drawn for the whole network, not one for every weight. A step draws from every component and weighs
the results by π, L = Σ_c π_c E_c[log p(D, w) − log q(w)], so that gradients reach π directly; log q is the mixture's
density at the draw, and there is no closed form of the KL.

The user's own tensor is the mean of the mixture: with offsets o trained beside it, μ_c = m + o_c − Σ_j π_j o_j.

Jaakkola & Jordan 1998, "Improving the mean field approximation via the use of mixture distributions" ·
Gershman, Hoffman & Blei 2012, arXiv:1206.4665
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayeslim.families.base import Density, Draw, Family, add_parameter, count_kept, masked, precise_dtype, without_cut
from bayeslim.io.registry import register
from bayeslim.noise import standard_normal, standard_normals_like
from bayeslim.posteriors import Mixture, Posterior
from bayeslim.sites import tensor_at
from bayeslim.types import Params, flattened

LOGITS = "mixture_logits"


@register("family")
@dataclass(frozen=True)
class MixtureOfGaussians(Family):
    """A mixture of networks with independent weights, trained in π, μ and log σ.

    For data that several settings of the weights explain as well, such as y = w² x, which does not tell the sign of w:
    independent weights fit one of the two and miss log 2 of the evidence, two components fit both.

        bnn = bl.bayesianize(network, bl.Variational(MixtureOfGaussians(2, spread=5.0)), likelihood=...)
        bnn.fit(loader, epochs=200)
        bnn.posterior_.means["w"], bnn.posterior_.weights       # −1.1 and 1.1, a half each

    The mean network of such a posterior lies between its modes and need not be any good: predict with draws, or at the
    best component with `predict(how="map")`.

    Attributes:
        components: the number of Gaussians, C. A step costs C times as much.
        initial_std: the initial σ of every weight.
        spread: the initial distance of the components: their means are drawn around the network's weights with this
            many times the root mean square of each parameter.
    """

    components: int = 4
    initial_std: float = 0.01
    spread: float = 0.5
    name: ClassVar[str] = "mixture"
    suffixes: ClassVar[tuple[str, ...]] = ("_offset", "_log_std")
    at_the_root: ClassVar[tuple[str, ...]] = (LOGITS,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.components) is not int or self.components < 1:
            raise ValueError(f"components is a number of Gaussians, at least 1. Got {self.components!r}.")
        for setting in ("initial_std", "spread"):
            if not getattr(self, setting) > 0:
                raise ValueError(f"{setting} is a standard deviation and must be positive. Got {self}.")

    @property
    def numbers_per_weight(self) -> int:
        """The offset and the log σ of every component."""
        return 2 * self.components

    def register(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Add offsets and log σ, (C, *shape), for every parameter, and log π to the model."""
        for name in names:
            mean = model.get_parameter(name)
            shape, dtype = (self.components, *mean.shape), precise_dtype(mean)
            size = mean.detach().to(dtype).square().mean().sqrt().clamp(min=self.initial_std)
            noise = standard_normal(shape, dtype=dtype, device=mean.device)
            add_parameter(model, f"{name}_offset", (noise - noise.mean(0)) * size * self.spread)
            start = torch.full(shape, math.log(self.initial_std), dtype=dtype, device=mean.device)
            add_parameter(model, f"{name}_log_std", start)
        like = model.get_parameter(f"{names[0]}_log_std")
        add_parameter(model, LOGITS, like.new_zeros(self.components))

    def _means(self, model: nn.Module, name: str, weights: Tensor) -> Tensor:
        """Compute μ of every component, (C, *shape)."""
        offset = tensor_at(model, f"{name}_offset")
        centre = (weights.view(-1, *[1] * (offset.ndim - 1)) * offset).sum(0)
        return tensor_at(model, name).to(offset.dtype) - centre + offset

    def density(self, model: nn.Module, names: tuple[str, ...], masks: Mapping[str, Tensor]) -> MixedWeights:
        """Build q at the present parameters, differentiable."""
        log_weights = tensor_at(model, LOGITS).log_softmax(0)
        means = {name: self._means(model, name, log_weights.exp()) for name in names}
        log_stds: Params = {name: tensor_at(model, f"{name}_log_std") for name in names}
        return MixedWeights(log_weights, means, log_stds, masks)

    def posterior(self, model: nn.Module, names: tuple[str, ...]) -> Mixture:
        """Build the posterior at the present parameters, as data."""
        with torch.no_grad():
            log_weights = model.get_parameter(LOGITS).log_softmax(0)
            return Mixture(
                log_weights,
                {n: self._means(model, n, log_weights.exp()).to(model.get_parameter(n).dtype) for n in names},
                {n: model.get_parameter(f"{n}_log_std").exp() for n in names},
            )

    def assign(self, model: nn.Module, posterior: Posterior, masks: Mapping[str, Tensor]) -> None:
        """Cut the weights from every component, and set π to that of the conditional."""
        assert isinstance(posterior, Mixture)
        super().assign(model, posterior, masks)
        with torch.no_grad():
            model.get_parameter(LOGITS).copy_(posterior.log_weights)
            for name, value in posterior.mean.items():
                model.get_parameter(f"{name}_offset").copy_(posterior.means[name] - value)


class MixedWeights(Density):
    """A mixture of independent weights, log q(w) = log Σ_c π_c Π N(wᵢ | μ_ci, σ_ci²)."""

    def __init__(self, log_weights: Tensor, means: Params, log_stds: Params, masks: Mapping[str, Tensor]):
        self.log_weights = log_weights
        self.means, self.masks = masked(means, masks), masks
        self.log_stds, self.stds = without_cut(log_stds, masks)

    def noise(self) -> Params:
        """Draw ε for every weight."""
        one = {name: std[0] for name, std in self.stds.items()}
        return standard_normals_like(one, one)

    def draw(self, noise: Params, component: int | Tensor = 0) -> Draw:
        """Compute w = μ_c + σ_c ε."""
        weights = {
            name: torch.addcmul(mean[component], self.stds[name][component], noise[name])
            for name, mean in self.means.items()
        }
        return Draw(weights, noise, component)

    def log_prob(self, draw: Draw) -> Tensor:
        """Compute the log-density of the mixture."""
        components = self.log_weights
        for name, mean in self.means.items():
            own = self.stds[name][draw.component] * draw.noise[name]
            # μ_c + σ_c ε − μ_j, without rounding where it is the draw's own component
            off = (own + (mean[draw.component] - mean)) * torch.exp(-self.log_stds[name])
            components = components - flattened(0.5 * off.square() + self.log_stds[name], 1).sum(1)
        count = count_kept({name: mean[0] for name, mean in self.means.items()}, self.masks)
        return components.logsumexp(0) - 0.5 * math.log(2 * math.pi) * count
