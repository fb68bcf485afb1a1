"""The table of networks by name, and the note each network carries of how it was built."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from bayeslim.errors import closest

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)

FACTORIES: dict[str, Callable[..., nn.Module]] = {}
"""Factories by name; `register` adds to it."""


def register(factory: Callable[P, M]) -> Callable[P, M]:
    """Enter `factory` into the table under its own name.

    The networks it builds keep the arguments, defaults included, as `module.zoo_config`, a plain dict.
    `create(**module.zoo_config)` builds the same architecture again. Arguments must be numbers, strings or None, so
    that the dict can be written as JSON.
    """
    name = factory.__name__
    if name in FACTORIES:
        raise ValueError(f'The zoo has a network called "{name}" already. Give the new factory another name.')
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def build(*args: P.args, **kwargs: P.kwargs) -> M:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        module = factory(*args, **kwargs)
        object.__setattr__(module, "zoo_config", {"name": name, **bound.arguments})
        return module

    FACTORIES[name] = build
    return build


def create(name: str, **arguments: Any) -> nn.Module:
    """Build a network by its name.

    >>> create("lenet5", classes=5).fc2
    Linear(in_features=500, out_features=5, bias=True)

    Args:
        name: one of `names()`.
        **arguments: of its factory.
    """
    if name not in FACTORIES:
        alike = closest(name, FACTORIES)
        hint = f" Closest: {alike}." if alike else ""
        raise ValueError(f'The zoo has no network called "{name}".{hint} It has: {", ".join(names())}.')
    factory = FACTORIES[name]
    accepted = inspect.signature(factory).parameters
    unknown = [key for key in arguments if key not in accepted]
    if unknown:
        raise TypeError(f"{name} does not take {', '.join(unknown)}. It takes: {', '.join(accepted)}.")
    return factory(**arguments)


def names() -> list[str]:
    """List the names that `create` knows, sorted."""
    return sorted(FACTORIES)
