"""Priors p(w): what is believed of a weight before the data.

A prior is data; `log_prob` is elementwise, and `kl` is KL(q ‖ p) for a diagonal Gaussian q, summed over the weights: in
closed form where one exists, else by Monte Carlo.

`bayesianize(prior=...)` takes one prior for the whole model, or a dict from selections of parameters (names, modules,
regular expressions, as in `sites`) to priors, of which the first that matches counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayeslim.errors import NoSiteMatched, ShapeMismatch
from bayeslim.noise import standard_normal_like
from bayeslim.select import matcher, owner


class Prior:
    """The base of all priors."""

    name: ClassVar[str]
    is_proper: ClassVar[bool] = True
    """Whether it integrates to one; an evidence exists only then."""

    def log_prob(self, weight: Tensor) -> Tensor:
        """Log p(w) of every element."""
        raise NotImplementedError

    def kl(self, mean: Tensor, std: Tensor, log_std: Tensor | None = None) -> Tensor:
        """KL(N(mean, std²) ‖ p), summed; here by one Monte-Carlo draw, E_q[log q(w) − log p(w)].

        Args:
            mean: q's means.
            std: q's standard deviations.
            log_std: their logarithms, where they are known already.
        """
        weight = mean + std * standard_normal_like(mean)
        entropy = (std.log() if log_std is None else log_std) + 0.5 * math.log(2 * math.pi * math.e)
        return -(self.log_prob(weight) + entropy).sum()

    def weights(self, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """μ and σ to compute with, and KL(N(μ, σ²) ‖ p): one step of the graph where their gradients can be joined."""
        std = log_std.exp()
        # The sum over the weights of a half-precision network needs the precision of σ.
        return mean, std, self.kl(mean.to(std.dtype), std, log_std)

    def at(self, mask: Tensor) -> Prior:
        """The prior of the weights that a mask picks, in a row; itself, unless weights have settings of their own."""
        return self

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw weights of a shape."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, for saving."""
        return {}


@dataclass(frozen=True)
class Normal(Prior):
    """N(mean, std²); a Gaussian prior is weight decay.

    Attributes:
        std: the *standard deviation*, a number or a tensor that broadcasts to the parameter.
        mean: the centre, likewise.
    """

    std: float | Tensor = 1.0
    mean: float | Tensor = 0.0
    name: ClassVar[str] = "normal"

    def __post_init__(self) -> None:
        if not bool(torch.as_tensor(self.std).gt(0).all()):
            raise ValueError(f"Normal(std=...) is a standard deviation and must be positive. Got {self.std}.")

    def log_prob(self, weight: Tensor) -> Tensor:
        """−½ ((w − m)/s)² − log s − ½ log 2π."""
        std = torch.as_tensor(self.std, dtype=weight.dtype, device=weight.device)
        mean = torch.as_tensor(self.mean, dtype=weight.dtype, device=weight.device)
        return -0.5 * ((weight - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)

    def kl(self, mean: Tensor, std: Tensor, log_std: Tensor | None = None) -> Tensor:
        """½ Σ [((μ − m)² + σ²)/s² − 1 − log(σ²/s²)]."""
        log_std = std.log() if log_std is None else log_std
        scale = torch.as_tensor(self.std, dtype=std.dtype, device=std.device)
        off = (mean - torch.as_tensor(self.mean, dtype=std.dtype, device=std.device)) / scale
        return 0.5 * (off.square() + (std / scale).square() - 1).sum() - (log_std - scale.log()).sum()

    def weights(self, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """μ, σ and the KL, with all their gradients in as few passes over the weights as there are."""
        varies = isinstance(self.std, Tensor) or isinstance(self.mean, Tensor)
        if varies or mean.dtype != log_std.dtype or torch.compiler.is_compiling():  # a compiler joins them by itself
            return super().weights(mean, log_std)
        found: tuple[Tensor, Tensor, Tensor] = _NormalWeights.apply(mean, log_std, float(self.mean), float(self.std))
        return found

    def at(self, mask: Tensor) -> Normal:
        """The prior of the weights that a boolean mask picks."""
        own = [
            v.to(mask.device).expand(mask.shape)[mask] if isinstance(v, Tensor) else v for v in (self.std, self.mean)
        ]
        return Normal(*own)

    def sample(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Draw weights of a shape."""
        draws: Tensor = torch.randn(shape, generator=generator) * self.std + self.mean
        return draws

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, for saving."""
        return {"std": self.std, "mean": self.mean}


class _NormalWeights(torch.autograd.Function):
    """(μ, log σ) ↦ (μ, σ, KL(N(μ, σ²) ‖ N(m, s²)) summed).

    The KL's own gradients, (μ − m)/s² and σ²/s² − 1 in log σ, are added to those of the data on their way to the
    parameters: on a CPU a step of a small network is made of such passes over the weights.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, centre: float, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        std = log_std.exp()
        ctx.save_for_backward(mean, std)
        ctx.centre, ctx.scale = centre, scale
        squares = _sum_of_squares(mean - centre if centre else mean) + _sum_of_squares(std)
        kl = 0.5 / scale**2 * squares - log_std.sum() - mean.numel() * (0.5 - math.log(scale))
        return mean.view_as(mean), std, kl

    @staticmethod
    def backward(ctx: Any, to_mean: Tensor, to_std: Tensor, to_kl: Tensor) -> tuple[Tensor, Tensor, None, None]:
        mean, std = ctx.saved_tensors
        to_mean, to_std = (g.to_dense() if g.is_sparse else g for g in (to_mean, to_std))
        precision = to_kl / ctx.scale**2
        off = mean - ctx.centre if ctx.centre else mean
        to_log_std = torch.addcmul(to_std, std, precision) * std
        return torch.addcmul(to_mean, off, precision), to_log_std.sub_(to_kl), None, None


def _sum_of_squares(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.dot(flat, flat)


PriorSpec = Prior | Mapping[Any, Prior]


def resolve(prior: PriorSpec, model: nn.Module, names: tuple[str, ...]) -> dict[str, Prior]:
    """The prior of every random parameter."""
    found = _matched(prior, model, names)
    for name, chosen in found.items():
        for field, value in chosen.config().items():
            if isinstance(value, Tensor):
                _check_broadcasts(value, model.get_parameter(name), f'{field} of the prior of "{name}"')
    return found


def _matched(prior: PriorSpec, model: nn.Module, names: tuple[str, ...]) -> dict[str, Prior]:
    if isinstance(prior, Prior):
        return dict.fromkeys(names, prior)
    if not isinstance(prior, Mapping) or not all(isinstance(p, Prior) for p in prior.values()):
        raise TypeError(
            "prior must be one of bayeslim.priors (such as priors.Normal(1.0)) or a dict from names to priors. "
            f"Got {prior!r}."
        )
    matchers = [(matcher(selection), p) for selection, p in prior.items()]
    found: dict[str, Prior] = {}
    for name in names:
        module, _ = owner(model, name)
        chosen = next((p for match, p in matchers if match(name, model.get_parameter(name), module)), None)
        if chosen is None:
            raise NoSiteMatched(
                f'No prior was given for "{name}": the dict has {", ".join(map(repr, prior))}. '
                'Add an entry for it, or "all" as the last key for the rest.'
            )
        found[name] = chosen
    return found


def _check_broadcasts(value: Tensor, parameter: Tensor, what: str) -> None:
    """A larger shape would count every weight several times."""
    try:
        fits = torch.broadcast_shapes(value.shape, parameter.shape) == parameter.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ShapeMismatch(
            f"The {what} must broadcast to the parameter's shape {tuple(parameter.shape)}. Got {tuple(value.shape)}."
        )


PRIORS: dict[str, type[Prior]] = {c.name: c for c in (Normal,)}
"""Priors by the name they are saved under; a new one is added here."""
