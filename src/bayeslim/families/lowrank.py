"""Correlated weights: a Gaussian with a diagonal plus low-rank covariance.

    w = μ + σ ε + U z,      ε ~ N(0, I_D),  z ~ N(0, I_r),      q(w) = N(μ, diag(σ²) + U Uᵀ)

With B = diag(σ)⁻¹ U (D × r) and M = I + BᵀB (r × r), the determinant lemma and Woodbury's identity give

    log|Σ| = Σ 2 log σ + log|M|        (w − μ)ᵀ Σ⁻¹ (w − μ) = ‖ε − B d‖² + ‖z + d‖²,     d = M⁻¹(Bᵀε − z),

in O(D r²), and in terms of the noise, so that nothing cancels where U is far larger than σ. The covariance is over all
parameters together. The KL to a prior of independent weights is that of the marginals N(μᵢ, τᵢ²), τ² = σ² + Σⱼ U²ᵢⱼ,
plus the total correlation, here in closed form:

    KL(q ‖ p) = Σ KL(qᵢ ‖ pᵢ) + Σ log τᵢ − ½ log|Σ|.

Ong, Nott & Smith 2018, arXiv:1701.03208 · Tomczak, Swaroop & Turner 2020, "Efficient low rank Gaussian variational
inference for neural networks"
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
from bayeslim.posteriors import LowRankCovariance, Posterior
from bayeslim.priors import Prior
from bayeslim.sites import tensor_at
from bayeslim.types import Params, flattened

LATENT = ""
"""The key of z among the noise; no parameter has an empty name."""


@register("family")
@dataclass(frozen=True)
class LowRankGaussian(Family):
    """A Gaussian with covariance diag(σ²) + U Uᵀ, trained in μ, log σ and U.

    Attributes:
        rank: the number of directions, r.
        initial_std: the initial σ of every weight; the initial U is random, with the same total variance.
    """

    rank: int = 4
    initial_std: float = 0.01
    name: ClassVar[str] = "lowrank"
    suffixes: ClassVar[tuple[str, ...]] = ("_log_std", "_factor")

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank is a number of directions and must be at least 1. Got {self.rank!r}.")
        if not self.initial_std > 0:
            raise ValueError(f"initial_std is a standard deviation and must be positive. Got {self.initial_std}.")

    @property
    def numbers_per_weight(self) -> int:
        """The log σ, and a row of U."""
        return self.rank + 1

    def register(self, model: nn.Module, names: tuple[str, ...]) -> None:
        """Add log σ and the rows of U, (r, *shape), to every parameter's module."""
        for name in names:
            mean = model.get_parameter(name)
            dtype = precise_dtype(mean)
            add_parameter(model, f"{name}_log_std", torch.full_like(mean, math.log(self.initial_std), dtype=dtype))
            # At U = 0 its gradient vanishes in expectation.
            directions = standard_normal((self.rank, *mean.shape), dtype=dtype, device=mean.device)
            add_parameter(model, f"{name}_factor", directions * (self.initial_std / math.sqrt(self.rank)))

    def density(self, model: nn.Module, names: tuple[str, ...], masks: Mapping[str, Tensor]) -> CorrelatedWeights:
        """Build q at the present parameters, differentiable."""
        log_stds: Params = {name: tensor_at(model, f"{name}_log_std") for name in names}
        factors: Params = {name: tensor_at(model, f"{name}_factor") for name in names}
        means = {name: tensor_at(model, name).to(log_stds[name].dtype) for name in names}
        return CorrelatedWeights(means, log_stds, factors, masks)

    def posterior(self, model: nn.Module, names: tuple[str, ...]) -> LowRankCovariance:
        """Build the posterior at the present parameters, as data."""
        with torch.no_grad():
            return LowRankCovariance(
                {name: model.get_parameter(name).detach().clone() for name in names},
                {name: model.get_parameter(f"{name}_log_std").exp() for name in names},
                {name: model.get_parameter(f"{name}_factor").detach().clone() for name in names},
            )

    def assign(self, model: nn.Module, posterior: Posterior, masks: Mapping[str, Tensor]) -> None:
        """Move the survivors, which keep their σ, and set U to the conditional's."""
        assert isinstance(posterior, LowRankCovariance)
        super().assign(model, posterior, masks)
        with torch.no_grad():
            for name, value in posterior.factor.items():
                model.get_parameter(f"{name}_factor").copy_(value)


class CorrelatedWeights(Density):
    """N(μ, diag(σ²) + U Uᵀ)."""

    def __init__(self, means: Params, log_stds: Params, factors: Params, masks: Mapping[str, Tensor]):
        self.means, self.masks = means, masks
        self.log_stds, self.stds = without_cut(log_stds, masks)
        self.factors = masked(factors, masks)
        self.scaled = {n: flattened(t * torch.exp(-self.log_stds[n]), 1) for n, t in self.factors.items()}
        first = next(iter(self.scaled.values()))
        self.log_weights = first.new_zeros(1)
        with _full_precision(first):
            inner = torch.stack([b @ b.mT for b in self.scaled.values()]).sum(0)
            inner = inner + torch.eye(len(first), dtype=first.dtype, device=first.device)
            self.root = torch.linalg.cholesky_ex(inner).L  # positive definite: no check, which a GPU waits for

    def noise(self) -> Params:
        """Draw ε for every weight, and z."""
        first = self.log_weights
        latent = standard_normal((len(self.root),), dtype=first.dtype, device=first.device)
        return standard_normals_like(self.stds, self.stds) | {LATENT: latent}

    def draw(self, noise: Params, component: int | Tensor = 0) -> Draw:
        """Compute w = μ + σ ε + U z."""
        weights = {}
        with _full_precision(self.root):
            for name, mean in self.means.items():
                along = (noise[LATENT] @ flattened(self.factors[name], 1)).view(mean.shape)
                weights[name] = torch.addcmul(mean, self.stds[name], noise[name]) + along
        return Draw(weights, noise)

    def log_prob(self, draw: Draw) -> Tensor:
        """Compute −½ log|Σ| − ½ (w − μ)ᵀ Σ⁻¹ (w − μ) − n/2 log 2π."""
        noise = masked({name: draw.noise[name] for name in self.means}, self.masks)
        latent = draw.noise[LATENT]
        with _full_precision(self.root):
            pull = torch.stack([b @ noise[n].flatten() for n, b in self.scaled.items()]).sum(0) - latent
            shift = torch.cholesky_solve(pull[:, None], self.root)[:, 0]
            squares = [(noise[n].flatten() - shift @ b).square().sum() for n, b in self.scaled.items()]
        quadratic = torch.stack(squares).sum() + (latent + shift).square().sum()
        log_prob: Tensor = -0.5 * (
            self.log_det() + quadratic + count_kept(self.means, self.masks) * math.log(2 * math.pi)
        )
        return log_prob

    def log_det(self) -> Tensor:
        """Compute log|Σ| over the kept weights."""
        diagonal = torch.stack([t.sum() for t in self.log_stds.values()]).sum()
        log_det: Tensor = 2 * (diagonal + self.root.diagonal().log().sum())
        return log_det

    def kl(self, priors: Mapping[str, Prior]) -> Tensor:
        """Add the KLs of the marginals and the total correlation."""
        total = -0.5 * self.log_det()
        for name, prior in priors.items():
            mean = self.means[name]
            variance = (2 * self.log_stds[name]).exp() + self.factors[name].square().sum(0)
            if name in self.masks:
                kept = self.masks[name]
                prior, mean, variance = prior.at(kept), mean[kept], variance[kept]
            log_std = 0.5 * variance.log()
            total = total + log_std.sum() + prior.kl(mean, log_std.exp(), log_std)
        return total


def _full_precision(like: Tensor) -> torch.autocast:
    """Switch autocast off: the family's own algebra needs full precision."""
    return torch.autocast(like.device.type, enabled=False)
