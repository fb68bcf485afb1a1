"""The assignment of priors and their hyperparameters to random parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from bayeslim.errors import NoSiteMatched
from bayeslim.priors.base import Prior
from bayeslim.priors.learnable import Learnable
from bayeslim.sites import check_names, matcher, owner


@dataclass(frozen=True)
class Separate:
    """A prior that is not shared: each layer, or each parameter, gets its own copy.

    Made by `per_layer` and `per_parameter`.
    """

    prior: Learnable
    by: Literal["layer", "parameter"]


def per_layer(prior: Learnable) -> Separate:
    """Give every layer its own copy of a prior.

    An example is `per_layer(Normal(learn=True))`. The weight and the bias of a layer share it.
    """
    return _separate(prior, "layer")


def per_parameter(prior: Learnable) -> Separate:
    """Give every parameter its own copy of a prior."""
    return _separate(prior, "parameter")


def _separate(prior: Any, by: Literal["layer", "parameter"]) -> Separate:
    if not isinstance(prior, Learnable) or not prior.learned:
        raise ValueError(
            f"per_{by} needs a prior that is learned, such as priors.Normal(1.0, learn=True): copies of a fixed prior "
            f"are all the same. Got {prior!r}."
        )
    return Separate(prior, by)


PriorSpec = Prior | Separate | Mapping[Any, Prior | Separate]
"""One prior for the whole model, or a dict from selections of parameters to priors; the first that matches counts."""


def resolve(prior: PriorSpec, model: nn.Module, names: tuple[str, ...]) -> dict[str, Prior]:
    """Find the prior of every random parameter; one object is one set of settings."""
    copies: dict[tuple[int, str], Prior] = {}
    found: dict[str, Prior] = {}
    for name, chosen in _matched(prior, model, names).items():
        if isinstance(chosen, Separate):
            own = name if chosen.by == "parameter" else name.rpartition(".")[0]
            found[name] = copies.setdefault((id(chosen), own), replace(chosen.prior))
        else:
            found[name] = copies.setdefault((id(chosen), ""), _constant(chosen))
        found[name].check_fits(name, model.get_parameter(name))
    return found


def _matched(prior: PriorSpec, model: nn.Module, names: tuple[str, ...]) -> dict[str, Prior | Separate]:
    if isinstance(prior, (Prior, Separate)):
        return dict.fromkeys(names, prior)
    if not isinstance(prior, Mapping) or not all(isinstance(p, (Prior, Separate)) for p in prior.values()):
        raise TypeError(
            "prior must be one of bayeslim.priors (such as priors.Normal(1.0)) or a dict from names to priors. "
            f"Got {prior!r}."
        )
    check_names(model, prior, "prior")
    matchers = [(matcher(selection), p) for selection, p in prior.items()]
    found: dict[str, Prior | Separate] = {}
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


def _constant(prior: Prior) -> Prior:
    """Detach settings that have a gradient graph, as those of another network may."""
    if not isinstance(prior, Learnable):
        return prior
    settings = {name: prior.setting(name) for name in prior.hyperparameters()}
    computed = {n: v.detach() for n, v in settings.items() if isinstance(v, Tensor) and v.grad_fn is not None}
    return replace(prior.with_settings(computed), learn=prior.learn, hyperprior=prior.hyperprior) if computed else prior
