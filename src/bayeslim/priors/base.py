"""What a prior is: a density of every weight, and how far a Gaussian is from it."""

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


LARGE = 1 << 21
"""From so many weights on computing takes longer than the calls that it is made of."""


class Prior:
    """The base of all priors. A new one says its `name` and its `log_prob`, and `kl` where that has a closed form."""

    name: ClassVar[str]
    is_proper: ClassVar[bool] = True
    """Whether it integrates to one; an evidence exists only then."""
    is_one_for_all: ClassVar[bool] = False
    """Whether its KL is the same function of every weight, whatever the parameter, and has no settings of its own."""
    samples: int = 1
    """Draws for a KL that is estimated."""

    def log_prob(self, weight: Tensor) -> Tensor:
        """Log p(w) of every element."""
        raise NotImplementedError

    def kl(self, mean: Tensor, std: Tensor, log_std: Tensor | None = None) -> Tensor:
        """KL(N(mean, std²) ‖ p), summed; here −H(q) − E_q[log p(w)] with the expectation from draws, in pairs ε, −ε.

        Args:
            mean: q's means.
            std: q's standard deviations.
            log_std: their logarithms, where they are known already.
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
        """μ and σ of several parameters, to compute with, and KL(N(μ, σ²) ‖ p) of all of them.

        It is one step of the graph where the gradients of all that can be joined.

        Args:
            means: of every parameter.
            log_stds: of every parameter.
            squared: of which ones σ² is wanted instead of σ.
        """
        pairs, stds = list(zip(means, log_stds, strict=True)), [log_std.exp() for log_std in log_stds]
        if self.is_one_for_all and len(pairs) > 1 and means[0].is_cuda and sum(m.numel() for m in means) < LARGE:
            kl = self.kl_of_all(pairs)
        else:  # the sum over the weights of a half-precision network needs the precision of σ
            kls = [self.kl(m.to(s.dtype), s, log) for (m, log), s in zip(pairs, stds, strict=True)]
            kl = kls[0] if len(kls) == 1 else torch.stack(kls).sum()
        return means, [std.square() if square else std for std, square in zip(stds, squared, strict=True)], kl

    def kl_of_all(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The KL of several parameters' (μ, log σ) at once: as many steps of the graph as for one of them."""
        log_std = torch.cat([log_std.reshape(-1) for _, log_std in pairs])
        return self.kl(torch.cat([mean.reshape(-1) for mean, _ in pairs]).to(log_std.dtype), log_std.exp(), log_std)

    def at(self, mask: Tensor) -> Prior:
        """The prior of the weights that a mask picks, in a row; itself, unless weights have settings of their own."""
        return self

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw weights of a shape."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, for saving."""
        return {}

    def check_fits(self, name: str, parameter: Tensor) -> None:
        """Refuse to be the prior of a parameter that it cannot be the prior of."""
        for setting, value in self.config().items():
            if isinstance(value, Tensor):
                check_broadcasts(value.shape, parameter, f'{setting} of the prior of "{name}"')


def check_broadcasts(shape: torch.Size, parameter: Tensor, what: str) -> None:
    """Refuse a shape that does not broadcast to the parameter's: a larger one would count weights several times."""
    try:
        fits = torch.broadcast_shapes(shape, parameter.shape) == parameter.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ShapeMismatch(
            f"The {what} must broadcast to the parameter's shape {tuple(parameter.shape)}. Got {tuple(shape)}."
        )
