"""The base of all gates: a random scale z that a group of weights shares.

    w = z ∘ w̃,      KL(q(w̃, z) ‖ p(w̃, z)) = KL(q(w̃) ‖ p(w̃)) + KL(q(z) ‖ p(z))

A group is a part that can be removed from a network as a whole: an input, a unit, a channel, a head. The priors of z
prefer zero, so that the weights of groups which the data do not need shrink together. A gate knows nothing of networks:
it is the mathematics of `count` scales, given their parameters by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from bayeslim.errors import check_settings
from bayeslim.noise import current_generator
from bayeslim.priors import Prior
from bayeslim.types import Params

MAX_EXPONENT = 60.0
"""The exponent from which `bounded_exp` grows like a logarithm; float32 overflows at 88."""

Per = Literal["gate", "weight", "example"]


class Gate(ABC):
    """The base of all gates, frozen dataclasses of settings.

    Parameters go by short names, such as {"mean": ..., "log_std": ...}, one value for each gate, (count,), and (1,)
    where they are shared. They may be of any precision; results have at least single precision.
    """

    name: ClassVar[str]
    shared: ClassVar[tuple[str, ...]] = ()
    """The parameters that all gates of one layer share, of shape (1,)."""
    is_proper: ClassVar[bool] = False
    """Whether `kl` is the divergence to a prior that integrates to one; an evidence exists only then."""

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    @abstractmethod
    def threshold(self) -> float:
        """A setting: the score that a gate must exceed to stay open."""

    @property
    def per(self) -> Per:
        """A setting: what `kl` is counted for: a gate, a weight or an example.

        For a weight it counts once for each that goes with the gate. For an example the gates share a price in
        proportion to their weights: the mean loss of the examples gets Σ nᵢ klᵢ / Σ nᵢ, where nᵢ weights go with gate
        i. One price then suits networks and data sets of any size.
        """
        return "gate"

    @abstractmethod
    def start(self, count: int) -> Params:
        """Return the initial parameters, in single precision: scales close to one."""

    @abstractmethod
    def draw(self, own: Params, shape: tuple[int, ...]) -> Tensor:
        """Draw z independently, (*shape, count), differentiable (but see `surrogate`)."""

    @abstractmethod
    def mean(self, own: Params) -> Tensor:
        """Compute E[z], (count,)."""

    @abstractmethod
    def variance(self, own: Params) -> Tensor:
        """Compute Var[z], (count,)."""

    @abstractmethod
    def kl(self, own: Params) -> Tensor:
        """Compute KL(q(z) ‖ p(z)), summed over the gates."""

    @abstractmethod
    def score(self, own: Params) -> Tensor:
        """Score the gates in the unit of their paper, (count,); higher means keep."""

    def opened(self, own: Params) -> Tensor:
        """Compute a mask of the gates that stay open, (count,)."""
        return self.score(own) > self.threshold

    def fixed(self, own: Params) -> Tensor:
        """Compute the mean network's factors, (count,): E[z], 1 if centred, 0 if closed."""
        mean = self.mean(own)
        if not self.multiplies:
            mean = torch.ones_like(mean)
        return torch.where(self.opened(own), mean, torch.zeros_like(mean))

    @property
    def multiplies(self) -> bool:
        """Whether z scales the weights; a centred z is the scale of their prior, N(0, z²)."""
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
        """Compute the KL of the weights, summed, in expectation over z.

        None means that it is the usual one, to the network's prior.

        Args:
            own: the gates' parameters.
            mean: means of the weights' own posterior.
            std: its standard deviations; None for weights that are points, whose KL is −log p(w).
            groups: the number of the gate of every weight, integers that broadcast to the shape of `mean`.
            prior: the network's prior of these weights.
            others: E[z²] of the other gates of the weights, likewise; None where there are none.
        """
        return None

    @property
    def has_surrogate(self) -> bool:
        """Whether some parameters get their gradient from `surrogate`, not from the draws."""
        return False

    def surrogate(self, own: Params, z: Tensor, losses: Tensor) -> Tensor | None:
        """Compute a term of value zero whose gradient completes that of the mean loss.

        None means that the draws carry the whole gradient.

        Args:
            own: the gates' parameters.
            z: independent draws, (K, count): one for every example, or for every pass.
            losses: the loss of each draw, (K,). The objective is their mean.
        """
        return None

    def pick(self, own: Params, kept: Tensor) -> Params:
        """Select the parameters of some gates, by a mask or indices; shared ones stay."""
        return {name: value if name in self.shared else value[kept] for name, value in own.items()}


def precise(own: Mapping[str, Tensor], *names: str) -> tuple[Tensor, ...]:
    """Return parameters by name, half precision converted to float32.

    Half precision cannot tell a scale of 1 from one of 1.003.
    """
    return tuple(own[n].float() if own[n].dtype in (torch.float16, torch.bfloat16) else own[n] for n in names)


def log_alpha(mean: Tensor, log_std: Tensor) -> Tensor:
    """Compute log α = log σ²/μ² of Gaussian scales: noise relative to signal."""
    tiny = torch.finfo(mean.dtype).tiny
    return 2 * (log_std - mean.abs().clamp(min=tiny).log())


def bounded_exp(exponent: Tensor) -> Tensor:
    """Compute the exponential, continued by a logarithm before float32 overflows."""
    return exponent.clamp(max=MAX_EXPONENT).exp() * (1 + (exponent - MAX_EXPONENT).clamp(min=0).log1p())


def uniform(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Draw u ~ U(0, 1) like a tensor, never 0 or 1, whose logits are infinite."""
    half_step = 0.5 * torch.finfo(like.dtype).eps
    generator = current_generator(like.device)
    uniform = torch.rand(shape, dtype=like.dtype, device=like.device, generator=generator)
    return uniform.clamp(half_step, 1 - half_step)


def check_per(value: Any) -> None:
    """Raise a `ValueError` unless `per` is one of `Per`."""
    if value not in get_args(Per):
        raise ValueError(f'per must be "gate", "weight" or "example". Got {value!r}.')


def positive(setting: str, value: float) -> None:
    """Raise a `ValueError` unless a setting is positive."""
    if not value > 0:
        raise ValueError(f"{setting} must be a positive number. Got {value!r}.")
