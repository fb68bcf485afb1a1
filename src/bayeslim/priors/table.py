"""The priors of a network's random parameters, with their learned hyperparameters."""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributions import biject_to

from bayeslim.priors.base import Prior
from bayeslim.priors.learnable import CLOSED_FORM, Learnable

if TYPE_CHECKING:
    from bayeslim.posteriors import Posterior


class Hyperparameters(nn.Module):
    """The learned hyperparameters of one prior, from its values as it was given.

    Each is kept as `raw_<name>` on an unconstrained scale: log s for a scale s.
    """

    def __init__(self, prior: Learnable, like: list[Tensor]):
        super().__init__()
        self.prior = prior
        self.transforms: dict[str, Any] = {}
        self.shapes: dict[str, torch.Size] = {}
        precise = torch.float64 if any(p.dtype == torch.float64 for p in like) else torch.float32
        for name in prior.learned:
            value = torch.as_tensor(prior.setting(name), dtype=precise, device=like[0].device).detach()
            self.transforms[name] = biject_to(prior.hyperparameters()[name])
            self.shapes[name] = value.shape
            # At least one dimension: scalars cannot be sharded.
            raw = self.transforms[name].inv(value).reshape(value.shape or (1,)).clone()
            if prior.learned_by == CLOSED_FORM:
                self.register_buffer(f"raw_{name}", raw)
            else:
                self.register_parameter(f"raw_{name}", nn.Parameter(raw))

    def values(self) -> dict[str, Tensor]:
        """Compute the hyperparameters, differentiable in the raw ones."""
        return {
            name: transform(getattr(self, f"raw_{name}")).reshape(self.shapes[name])
            for name, transform in self.transforms.items()
        }

    def now(self) -> Prior:
        """Make the prior with the present hyperparameters."""
        return self.prior.with_settings(self.values())

    def set_(self, name: str, value: Tensor) -> None:
        """Set a hyperparameter."""
        raw: Tensor = getattr(self, f"raw_{name}")
        with torch.no_grad():
            raw.copy_(self.transforms[name].inv(value.to(raw)).reshape(raw.shape))


class Priors(Mapping[str, Prior]):
    """The prior of every random parameter by name, at its present hyperparameters.

    Learned hyperparameters are differentiable.

    Args:
        given: the priors by name; one object under several names is learned as one.
        parameters: the random parameters.

    Attributes:
        given: the priors before learning.
        learned: the hyperparameters of every prior that is learned.
        factors: by name, the factors of the standard deviations that a posterior was found under; see `used`.
    """

    def __init__(self, given: Mapping[str, Prior], parameters: Mapping[str, Tensor]):
        self.given = dict(given)
        self.learned = nn.ModuleList()
        self.factors: Mapping[str, float] = {}
        self._learned_of: dict[str, Hyperparameters] = {}
        for names in self.shared():
            prior = self.given[names[0]]
            if _is_learned(prior):
                own = Hyperparameters(prior, [parameters[name] for name in names])
                self.learned.append(own)
                self._learned_of.update(dict.fromkeys(names, own))

    def shared(self) -> list[list[str]]:
        """Group the names of the parameters that have the same prior object."""
        groups: dict[int, list[str]] = {}
        for name, prior in self.given.items():
            groups.setdefault(id(prior), []).append(name)
        return list(groups.values())

    def rescaled(self, factors: Mapping[str, float]) -> Priors:
        """Make a view of the same priors that knows how a posterior rescaled them."""
        view = copy.copy(self)
        view.factors = factors
        return view

    @property
    def used(self) -> dict[str, Prior]:
        """The priors of the posterior; those of a subnetwork's weights are rescaled."""
        found = dict(self.items())
        for name, factor in self.factors.items():
            prior = found[name]
            if isinstance(prior, Learnable):
                found[name] = prior.with_settings({"std": prior.setting("std") * factor})
        return found

    def __getitem__(self, name: str) -> Prior:
        return self._learned_of[name].now() if name in self._learned_of else self.given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)

    def __setitem__(self, name: str, prior: Prior) -> None:
        """Replace the prior of one parameter by a fixed one."""
        if name not in self.given or not isinstance(prior, Prior) or _is_learned(prior):
            raise ValueError(f'bnn.priors["{name}"] = ... takes a fixed prior of a random parameter. Got {prior!r}.')
        self.given[name] = prior
        replaced = self._learned_of.pop(name, None)
        if replaced is not None and replaced not in self._learned_of.values():
            del self.learned[list(self.learned).index(replaced)]

    def __or__(self, other: Mapping[str, Prior]) -> dict[str, Prior]:
        return dict(self.items()) | dict(other)

    def items(self) -> ItemsView[str, Prior]:
        """List names and priors; a shared prior is computed once."""
        if not len(self.learned):
            return self.given.items()
        now = {id(own): own.now() for own in self._learned_of.values()}
        return {
            name: now[id(self._learned_of[name])] if name in self._learned_of else prior
            for name, prior in self.given.items()
        }.items()

    def values(self) -> ValuesView[Prior]:
        """List the priors."""
        return dict(self.items()).values()

    def __repr__(self) -> str:
        used = self.used
        shown = []
        for name, prior in self.items():
            rescaled = f", rescaled to {used[name]!r} in the subnetwork" if name in self.factors else ""
            shown.append(f"{name!r}: {prior!r}{rescaled}")
        return f"{{{', '.join(shown)}}}"

    def log_hyperprior(self) -> Tensor | None:
        """Compute the log-density of learned hyperparameters; None without hyperpriors."""
        if not len(self.learned):
            return None
        found = [own.prior.log_hyperprior(own.values()) for own in self._distinct()]
        terms = [term for term in found if term is not None]
        return torch.stack([term.to(terms[0]) for term in terms]).sum() if terms else None

    @property
    def has_closed_forms(self) -> bool:
        """Whether some hyperparameters are learned in closed form."""
        return any(own.prior.learned_by == CLOSED_FORM for own in self._distinct())

    def maximise_(self, posterior: Posterior, masks: Mapping[str, Tensor]) -> None:
        """Set hyperparameters learned in closed form to their optimum for weights left."""
        for own in self._distinct():
            if own.prior.learned_by != CLOSED_FORM:
                continue
            (name,) = own.prior.learned
            shape = own.shapes[name]
            total, count = torch.zeros(2, *shape, dtype=torch.float64, device=getattr(own, f"raw_{name}").device)
            for parameter in (n for n, learned in self._learned_of.items() if learned is own):
                each = _expected(own.prior, posterior, parameter)
                kept = masks.get(parameter, torch.ones_like(each, dtype=torch.bool)).to(each.device)
                # Not a product with the mask: E|w| of a weight that is exactly zero is 0/0.
                total += each.masked_fill(~kept, 0).sum_to_size(shape).to(total)
                count += kept.to(each.dtype).sum_to_size(shape).to(total)
            before = own.values()[name].to(total)
            own.set_(name, torch.where(count > 0, own.prior.optimum(total / count), before))

    def _distinct(self) -> list[Hyperparameters]:
        return [own for own in self.learned if isinstance(own, Hyperparameters)]


def _is_learned(prior: Prior) -> TypeGuard[Learnable]:
    return isinstance(prior, Learnable) and bool(prior.learned)


def _expected(prior: Learnable, posterior: Posterior, name: str) -> Tensor:
    """Compute the statistic of every weight in float64, averaged over components."""
    mixture: Any = posterior
    if hasattr(mixture, "components"):
        each = torch.stack([_expected(prior, component, name) for component in mixture.components])
        shares = mixture.weights.to(each).view(-1, *[1] * (each.ndim - 1))
        averaged: Tensor = (shares * each).sum(0)
        return averaged
    return prior.statistic(posterior.mean[name].double(), posterior.variance[name].double().sqrt())
