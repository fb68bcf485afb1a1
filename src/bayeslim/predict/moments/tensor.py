"""`Moments`: a tensor that is known by its mean and its variance, and the table of what can be done with it.

It is a `torch.Tensor`, so the user's own modules run on it unchanged; every torch function that meets one is looked up
in `RULES` by name. A new operation is one entry: a function that takes the torch function and its arguments, with
`Moments` among them, and gives `Moments`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeslim.predict.moments.closed_forms import Moments3
from bayeslim.predict.moments.shared_noise import SharedNoise

Rule = Callable[..., Any]

RULES: dict[str, Rule] = {}
"""Rules by the name of the torch function, method or operator; `rule` adds to it."""

READABLE = {
    *("shape", "size", "ndim", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "is_contiguous"),
    *("dtype", "device", "get_device", "layout", "requires_grad", "is_floating_point", "is_complex"),
    *("is_cuda", "is_mps", "is_meta", "is_sparse", "is_nested", "is_quantized"),
}
"""What is the same for every draw, and may be asked for."""


class NoRule(Exception):
    """The network does something whose moments are not known."""


@dataclass(frozen=True)
class Activation:
    """A function of every element (or of the last outputs) that waits for its argument to be needed.

    Waiting pays: pooling can go first where the function never falls, and at the very end it is applied to the draws.

    Attributes:
        name: what to call it.
        apply: the function itself.
        moments: mean, variance and slope of it, given the mean and variance of a Gaussian; None for a function that
            can only stand at the end.
        rising: whether it never falls, so that it commutes with the maximum.
    """

    name: str
    apply: Callable[[Tensor], Tensor]
    moments: Callable[[Tensor, Tensor], Moments3] | None = None
    rising: bool = False


class Moments(Tensor):
    """Independent Gaussians, but for what they have in common.

    Attributes:
        mu: the mean.
        sigma2: the variance of each element.
        common: noise that several elements share, or None; its part of the variance is in `sigma2`.
        sources: the random parameters that it depends on.
        activation: a function still to be applied, or None.
    """

    mu: Tensor
    sigma2: Tensor
    common: SharedNoise | None
    sources: frozenset[str]
    activation: Activation | None

    @staticmethod
    def of(mu: Tensor, sigma2: Tensor, sources: frozenset[str], common: SharedNoise | None = None) -> Moments:
        """A new one."""
        return _filled(mu.as_subclass(Moments), mu, sigma2, sources, common)

    def settled(self) -> Moments:
        """With the activation applied."""
        if self.activation is None:
            return self
        if self.activation.moments is None:
            raise NoRule(f"{self.activation.name} can only be the last operation")
        mu, sigma2, slope = self.activation.moments(self.mu, self.sigma2)
        return Moments.of(mu, sigma2, self.sources, self.common and self.common.scaled(slope))

    def waiting_for(self, activation: Activation) -> Moments:
        """The same, with an activation still to be applied."""
        before = self.settled()
        after = Moments.of(before.mu, before.sigma2, before.sources, before.common)
        after.activation = activation
        return after

    def become(self, other: Moments) -> Moments:
        """Take another's place: what an operation in place does."""
        _filled(self, other.mu, other.sigma2, other.sources, other.common)
        self.activation = other.activation
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        waiting = f", then {self.activation.name}" if self.activation else ""
        return f"Moments of shape {tuple(self.mu.shape)}, random by {', '.join(sorted(self.sources))}{waiting}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name(func)
        found = RULES.get(name)
        if found is not None:
            return found(func, *args, **(kwargs or {}))
        if name in READABLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise NoRule(f"there is no rule for {name}")


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a function into the table of rules."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


def _filled(made: Moments, mu: Tensor, sigma2: Tensor, sources: frozenset[str], common: SharedNoise | None) -> Moments:
    made.mu, made.sigma2, made.sources, made.common, made.activation = mu, sigma2, sources, common, None
    return made


def _name(func: Any) -> str:
    """The name of a torch function; a property's own name rather than that of its getter."""
    name: str = getattr(func, "__name__", str(func))
    return str(func.__self__.__name__) if name == "__get__" else name
