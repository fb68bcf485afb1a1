"""Priors whose hyperparameters can be learned: empirical Bayes.

    maximise  L(q, h) = E_q[log p(D|w)] − KL(q ‖ p_h) + log p(h)      in q and in h together

by gradients, h trained like any parameter (on an unconstrained scale: log s of a standard deviation); or, where q alone
determines the best h, in closed form after every step. By the envelope theorem the gradient in q needs no term for how
that h moves with q. The hyperprior p(h) is optional, a density of h itself.

MacKay 1992, "Bayesian interpolation" · Graves 2011, "Practical variational inference for neural networks"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.constraints import Constraint

from bayeslim.priors.base import Prior
from bayeslim.priors.torch_distributions import beside

GRADIENT, CLOSED_FORM = "gradient", "closed form"
LOCATIONS = ("mean", "loc")
"""Hyperparameters that `learn=True` leaves where they are."""

_WORDS: dict[Constraint, str] = {
    constraints.positive: "positive",
    constraints.unit_interval: "between 0 and 1",
    constraints.real: "a number",
}


class Density(Protocol):
    """A hyperprior: one of `bayeslim.priors`, or of `torch.distributions`."""

    def log_prob(self, value: Tensor, /) -> Tensor:
        """Compute the log-density of every element."""
        ...


@dataclass(frozen=True, repr=False)
class Learnable(Prior):
    """The base of priors with hyperparameters.

    These are numbers, or tensors that broadcast to the parameter. One prior object is one set of hyperparameters, which
    all its parameters share.

    Attributes:
        learn: True to learn every hyperparameter but the location, a name or several to learn those, or "closed form".
        hyperprior: the density of the learned hyperparameter, one of `priors` or of `torch.distributions`; a dict by
            name for several hyperparameters.
    """

    learn: bool | str | tuple[str, ...] = field(default=False, kw_only=True)
    hyperprior: Density | Mapping[str, Density] | None = field(default=None, kw_only=True)
    limits: ClassVar[Mapping[str, Constraint]]
    """The constraint of each hyperparameter."""
    closed_form: ClassVar[str | None] = None
    """The hyperparameter that has a closed-form optimum."""

    def __post_init__(self) -> None:
        given: Any = self.learn
        if isinstance(given, (list, tuple)):
            object.__setattr__(self, "learn", tuple(given))
        for name, constraint in self.hyperparameters().items():
            self._check_setting(name, constraint)
        self._check_learning()
        if type(self.samples) is not int or self.samples < 1:
            raise ValueError(f"samples is a number of draws and must be at least 1. Got {self.samples!r}.")

    def hyperparameters(self) -> Mapping[str, Constraint]:
        """Return the constraint of each hyperparameter, by name."""
        return self.limits

    def setting(self, name: str) -> float | Tensor:
        """Read a hyperparameter as it was given."""
        value: float | Tensor = getattr(self, name)
        return value

    def setting_like(self, name: str, weight: Tensor) -> Tensor:
        """Read a hyperparameter as a tensor of a weight's dtype and device."""
        value = self.setting(name)
        if isinstance(value, Tensor):
            return value.to(device=weight.device, dtype=weight.dtype)
        return torch.full((), value, dtype=weight.dtype, device=weight.device)  # made on the device: nothing is copied

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Make a fixed copy with other settings, unchecked: a check waits for a GPU."""
        other, own = object.__new__(type(self)), {f.name: getattr(self, f.name) for f in fields(self)}
        # not copy.copy, which compilers of torch 2.11 refuse
        for name, value in {**own, **settings, "learn": False, "hyperprior": None}.items():
            object.__setattr__(other, name, value)
        return other

    def at(self, mask: Tensor) -> Self:
        """Select the prior of the weights that a boolean mask picks."""
        own = {}
        for name in self.hyperparameters():
            value = self.setting(name)
            if isinstance(value, Tensor) and value.ndim:
                own[name] = value.to(mask.device).expand(mask.shape)[mask]
        return self.with_settings(own) if own else self

    @property
    def learned(self) -> tuple[str, ...]:
        """The names of the hyperparameters that are learned."""
        if self.learn is True:
            return tuple(name for name in self.hyperparameters() if name not in LOCATIONS)
        if self.learn == CLOSED_FORM:
            return (self.closed_form,) if self.closed_form else ()
        return (self.learn,) if isinstance(self.learn, str) else self.learn or ()

    @property
    def learned_by(self) -> str | None:
        """The way of learning: "gradient", "closed form", or None for a fixed prior."""
        if not self.learned:
            return None
        return CLOSED_FORM if self.learn == CLOSED_FORM else GRADIENT

    def log_hyperprior(self, settings: Mapping[str, Tensor]) -> Tensor | None:
        """Compute log p(h) of the learned hyperparameters; None without a hyperprior."""
        if self.hyperprior is None:
            return None
        assert isinstance(self.hyperprior, Mapping)
        terms = []
        for name, density in self.hyperprior.items():
            here = beside(density, settings[name]) if isinstance(density, Distribution) else density
            terms.append(here.log_prob(settings[name]).sum())
        return torch.stack(terms).sum()

    def statistic(self, mean: Tensor, std: Tensor) -> Tensor:
        """Compute the expectation under q that the closed form averages, for every weight."""
        raise NotImplementedError

    def optimum(self, average: Tensor) -> Tensor:
        """Compute the best hyperparameter from the statistic's average over the weights."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, for saving."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __repr__(self) -> str:
        shown = (
            f"{f.name}={_plain(getattr(self, f.name))!r}"
            for f in sorted(fields(self), key=lambda f: bool(f.kw_only))
            if not f.kw_only or getattr(self, f.name) != f.default
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def _check_setting(self, name: str, constraint: Constraint) -> None:
        value = self.setting(name)
        what = f"{type(self).__name__}({name}=...)"
        if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
            raise TypeError(f"{what} must be a number or a tensor. Got {value!r}.")
        tensor = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
        inside = constraint.check(tensor) & torch.isfinite(tensor)
        if constraint is constraints.unit_interval:
            inside &= (tensor > 0) & (tensor < 1)
        if not bool(inside.all()):
            words = _WORDS.get(constraint, str(constraint))
            meaning = "is a standard deviation and " if "std" in name or "sigma" in name else ""
            raise ValueError(f"{what} {meaning}must be {words}, and finite. Got {value}.")

    def _check_learning(self) -> None:
        known, who = self.hyperparameters(), type(self).__name__
        if self.learn == CLOSED_FORM:
            if self.closed_form is None:
                raise ValueError(f"{who} has no hyperparameter with a closed form. Use learn=True.")
            if self.hyperprior is not None:
                raise ValueError('learn="closed form" is for learning without a hyperprior. Use learn=True with one.')
        elif not isinstance(self.learn, (bool, str, tuple)) or any(name not in known for name in self.learned):
            raise ValueError(
                f'learn must be True, False, "closed form", or some of {", ".join(known)}. Got {self.learn!r}.'
            )
        if self.hyperprior is None:
            return
        if not isinstance(self.hyperprior, Mapping):
            if len(self.learned) != 1:
                raise ValueError(
                    f"A hyperprior by itself is for one learned hyperparameter. {who} learns "
                    f"{', '.join(self.learned) or 'none'}. Pass a dict by name, and learn=..."
                )
            object.__setattr__(self, "hyperprior", {self.learned[0]: self.hyperprior})
        densities: Any = self.hyperprior
        for name, density in densities.items():
            if name not in self.learned:
                raise ValueError(f'There is a hyperprior of "{name}", which is not learned. Add it to learn=...')
            if not hasattr(density, "log_prob"):
                raise TypeError(
                    f"A hyperprior must be one of bayeslim.priors or of torch.distributions. Got {density!r}."
                )


def _plain(value: Any) -> Any:
    """Single numbers without the tensor around them."""
    return value.detach().item() if isinstance(value, Tensor) and not value.ndim else value
