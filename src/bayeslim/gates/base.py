"""What a gate is: a random scale z, shared by a group of weights, with a posterior q(z) and a prior p(z) of its own.

    w = z ∘ w̃,      KL(q(w̃, z) ‖ p(w̃, z)) = KL(q(w̃) ‖ p(w̃)) + KL(q(z) ‖ p(z))

A group is what can be taken out of a network as a whole: an input, a unit, a channel, a head. The priors of z prefer
zero, so that groups which the data do not ask for fade away together. A gate knows nothing of networks: it is the
mathematics of `count` scales, given their parameters by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bayeslim.noise import current_generator
from bayeslim.priors import Prior
from bayeslim.types import Params

LARGEST_EXPONENT = 60.0


class Gate(ABC):
    """The base of all gates, frozen dataclasses of settings.

    Parameters go by short names, such as {"mean": ..., "log_std": ...}, one value for each gate, (count,), and (1,)
    where they are shared. They may be of any precision; what is computed from them has single precision at least.
    """

    name: ClassVar[str]
    shared: ClassVar[tuple[str, ...]] = ()
    """The parameters that all gates of one layer share, of shape (1,)."""
    is_proper: ClassVar[bool] = False
    """Whether `kl` is the divergence to a prior that integrates to one; an evidence exists only then."""

    @property
    @abstractmethod
    def threshold(self) -> float:
        """A setting: the score that a gate must exceed to stay open."""

    @property
    def per(self) -> Literal["gate", "weight"]:
        """A setting: what `kl` is the price of, a gate, or each of the weights that go with it."""
        return "gate"

    @abstractmethod
    def start(self, count: int) -> Params:
        """The parameters to train, in single precision, where training starts: scales close to one."""

    @abstractmethod
    def draw(self, own: Params, shape: tuple[int, ...]) -> Tensor:
        """Independent draws z, (*shape, count), differentiable in the parameters (but see `surrogate`)."""

    @abstractmethod
    def mean(self, own: Params) -> Tensor:
        """E[z], (count,)."""

    @abstractmethod
    def variance(self, own: Params) -> Tensor:
        """Var[z], (count,)."""

    @abstractmethod
    def kl(self, own: Params) -> Tensor:
        """KL(q(z) ‖ p(z)), summed over the gates."""

    @abstractmethod
    def score(self, own: Params) -> Tensor:
        """What decides whether a gate stays, (count,): higher means keep. In the unit of its paper."""

    def opened(self, own: Params) -> Tensor:
        """Which gates stay open, (count,), bool."""
        return self.score(own) > self.threshold

    def fixed(self, own: Params) -> Tensor:
        """What multiplies the weights of the mean network, (count,): E[z] (1 for centred scales), 0 where closed."""
        mean = self.mean(own)
        if not self.multiplies:
            mean = torch.ones_like(mean)
        return torch.where(self.opened(own), mean, torch.zeros_like(mean))

    @property
    def multiplies(self) -> bool:
        """Whether z scales the weights; otherwise (centred scales) it is only the scale of their prior, N(0, z²)."""
        return True

    def weight_kl(
        self,
        own: Params,
        mean: Tensor,
        std: Tensor | None,
        groups: Tensor,
        prior: Prior,
        others: Tensor | None = None,
    ) -> Tensor | None:
        """The KL of the weights, summed, in expectation over z; None where it is that to the network's prior, as usual.

        Args:
            own: the gates' parameters.
            mean: means of the weights' own posterior.
            std: its standard deviations; None for weights that are points, whose KL is −log p(w).
            groups: the number of the gate of every weight, integers that broadcast to the shape of `mean`.
            prior: the network's prior of these weights.
            others: E[z²] of what other gates multiply the weights by, likewise; None where there are none.
        """
        return None

    @property
    def has_surrogate(self) -> bool:
        """Whether draws have no gradient in some parameters, so that a loss needs `surrogate` beside it."""
        return False

    def surrogate(self, own: Params, z: Tensor, losses: Tensor) -> Tensor | None:
        """A term of value zero whose gradient completes that of the mean loss; None where draws have all of it.

        Args:
            own: the gates' parameters.
            z: independent draws, (K, count): one for every example, or for every pass.
            losses: the loss that each draw met with, (K,). The objective is their mean.
        """
        return None

    def pick(self, own: Params, kept: Tensor) -> Params:
        """The parameters of some of the gates, by a mask or by numbers; shared ones stay."""
        return {name: value if name in self.shared else value[kept] for name, value in own.items()}


def precise(own: Mapping[str, Tensor], *names: str) -> tuple[Tensor, ...]:
    """Parameters by name, in single precision at least: half precision cannot tell a scale of 1 from one of 1.003."""
    return tuple(own[n].float() if own[n].dtype in (torch.float16, torch.bfloat16) else own[n] for n in names)


def log_alpha(mean: Tensor, log_std: Tensor) -> Tensor:
    """Log α = log σ²/μ² of Gaussian scales: the noise, relative to the signal."""
    tiny = torch.finfo(mean.dtype).tiny
    return 2 * (log_std - mean.abs().clamp(min=tiny).log())


def bounded_exp(exponent: Tensor) -> Tensor:
    """The exponential, but a logarithm from where single precision would soon overflow: finite, as is its slope."""
    return exponent.clamp(max=LARGEST_EXPONENT).exp() * (1 + (exponent - LARGEST_EXPONENT).clamp(min=0).log1p())


def uniform(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Draw u ~ U(0, 1) beside a tensor, never 0 or 1, whose logits would be infinite."""
    half_step = 0.5 * torch.finfo(like.dtype).eps
    generator = current_generator(like.device)
    uniform = torch.rand(shape, dtype=like.dtype, device=like.device, generator=generator)
    return uniform.clamp(half_step, 1 - half_step)


def check_per(value: Any) -> None:
    """Refuse what no price is of."""
    if value not in ("gate", "weight"):
        raise ValueError(f'per must be "gate" or "weight". Got {value!r}.')


def positive(setting: str, value: float) -> None:
    """Refuse a setting that is not a positive, finite number."""
    if not 0 < value < math.inf:
        raise ValueError(f"{setting} must be a positive number. Got {value!r}.")
