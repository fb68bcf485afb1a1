"""The base of all priors: the density of weights, and the KL of a Gaussian to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayeslim.errors import ShapeMismatch
from bayeslim.noise import standard_normal_like

LOG_GAUSSIAN_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)
"""The entropy of N(0, 1)."""


MANY_WEIGHTS = 1 << 21
"""From this number of weights on, the arithmetic takes longer than the calls that start it."""


class Prior:
    """The base of all priors.

    A new one defines its `name` and `log_prob`, and `kl` where that has a closed form.
    """

    name: ClassVar[str]
    is_proper: ClassVar[bool] = True
    """Whether it integrates to one; an evidence exists only then."""
    is_one_for_all: ClassVar[bool] = False
    """Whether its KL is the same function for every weight of every parameter, without settings."""
    samples: int = 1
    """The number of draws that estimate the KL."""

    def log_prob(self, weight: Tensor) -> Tensor:
        """Compute log p(w) of every element."""
        raise NotImplementedError

    def log_density(self, weights: Sequence[Tensor]) -> Tensor:
        """Compute log p of several parameters together."""
        return torch.stack([self.log_prob(weight).sum() for weight in weights]).sum()

    def kl(self, mean: Tensor, std: Tensor, log_std: Tensor | None = None) -> Tensor:
        """Compute KL(N(mean, std²) ‖ p), summed over the weights.

        Here it is −H(q) − E_q[log p(w)], with the expectation estimated by draws in antithetic pairs ε, −ε.

        Args:
            mean: q's means.
            std: q's standard deviations.
            log_std: the logarithms of `std`, where they are known already.
        """
        noise = standard_normal_like(mean)
        log_prob = self.log_prob(mean + std * noise).sum()
        for draw in range(1, self.samples):
            noise = -noise if draw % 2 else standard_normal_like(mean)
            log_prob = log_prob + self.log_prob(mean + std * noise).sum()
        entropy = (std.log() if log_std is None else log_std) + LOG_GAUSSIAN_ENTROPY
        return -log_prob / self.samples - entropy.sum()

    def weights(
        self, means: Sequence[Tensor], log_stds: Sequence[Tensor], squared: Sequence[bool]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
        """Compute μ, σ or σ², and the KL(N(μ, σ²) ‖ p) of several parameters.

        A prior may do this in one node of the gradient graph.

        Args:
            means: of every parameter.
            log_stds: of every parameter.
            squared: for which of them to return σ² instead of σ.
        """
        pairs, stds = list(zip(means, log_stds, strict=True)), [log_std.exp() for log_std in log_stds]
        if self.is_one_for_all and len(pairs) > 1 and means[0].is_cuda and sum(m.numel() for m in means) < MANY_WEIGHTS:
            kl = self.kl_of_all(pairs)
        else:  # the sum over the weights of a half-precision network needs the precision of σ
            kls = [self.kl(m.to(s.dtype), s, log) for (m, log), s in zip(pairs, stds, strict=True)]
            kl = kls[0] if len(kls) == 1 else torch.stack(kls).sum()
        return means, [std.square() if square else std for std, square in zip(stds, squared, strict=True)], kl

    def kl_of_all(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute the KL of several parameters' (μ, log σ) in one concatenated pass."""
        log_std = torch.cat([log_std.reshape(-1) for _, log_std in pairs])
        return self.kl(torch.cat([mean.reshape(-1) for mean, _ in pairs]).to(log_std.dtype), log_std.exp(), log_std)

    def at(self, mask: Tensor) -> Prior:
        """Select the prior of the weights that a mask picks; itself without own settings."""
        return self

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw weights of a shape."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, for saving."""
        return {}

    def check_fits(self, name: str, parameter: Tensor) -> None:
        """Raise a `ShapeMismatch` if the settings do not fit a parameter."""
        for setting, value in self.config().items():
            if isinstance(value, Tensor):
                check_broadcasts(value.shape, parameter, f'{setting} of the prior of "{name}"')


def check_broadcasts(shape: torch.Size, parameter: Tensor, what: str) -> None:
    """Raise a `ShapeMismatch` unless a shape broadcasts to the parameter's."""
    try:
        fits = torch.broadcast_shapes(shape, parameter.shape) == parameter.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ShapeMismatch(
            f"The {what} must broadcast to the parameter's shape {tuple(parameter.shape)}. Got {tuple(shape)}."
        )
