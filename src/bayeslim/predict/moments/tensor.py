"""`Moments`, a tensor of means and variances, and the table of operations on it.

It is a `torch.Tensor`, so that the user's own modules run on it unchanged: every torch function called on one is looked
up in `RULES` by name. A new operation is one entry: a function that takes the torch function and its arguments, with
`Moments` among them, and returns `Moments`.
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
"""Attributes and methods whose result is the same for every draw."""


class NoRule(Exception):
    """The network runs an operation whose moments are not known."""


@dataclass(frozen=True)
class Activation:
    """A function of every element (or of the last outputs) that is applied later, when its result is needed.

    Pooling can then go first where the function is nondecreasing, and at the end it is applied to the draws themselves.

    Attributes:
        name: of the torch function.
        apply: the function itself.
        moments: mean, variance and slope of it, given the mean and variance of a Gaussian; None for a function that
            can only stand at the end.
        rising: whether it is nondecreasing, so that it commutes with the maximum.
    """

    name: str
    apply: Callable[[Tensor], Tensor]
    moments: Callable[[Tensor, Tensor], Moments3] | None = None
    rising: bool = False


class Moments(Tensor):
    """Gaussians that are independent but for their shared noise.

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
        """Make a tensor of these moments."""
        return _filled(mu.as_subclass(Moments), mu, sigma2, sources, common)

    def settled(self) -> Moments:
        """Apply the activation that waits, if any."""
        if self.activation is None:
            return self
        if self.activation.moments is None:
            raise NoRule(f"{self.activation.name} can only be the last operation")
        mu, sigma2, slope = self.activation.moments(self.mu, self.sigma2)
        return Moments.of(mu, sigma2, self.sources, self.common and self.common.scaled(slope))

    def waiting_for(self, activation: Activation) -> Moments:
        """Set an activation that is still to be applied."""
        before = self.settled()
        after = Moments.of(before.mu, before.sigma2, before.sources, before.common)
        after.activation = activation
        return after

    def become(self, other: Moments) -> Moments:
        """Take over another's moments, as an operation in place does."""
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
    """Look up the name of a torch function; of a property, not of its getter."""
    name: str = getattr(func, "__name__", str(func))
    return str(func.__self__.__name__) if name == "__get__" else name
