"""The registry of classes that files and commands may name, by kind and name.

    @bl.register("prior")
    class Cauchy(bl.priors.Prior):
        name = "cauchy"

Now `save` writes the prior under the name "cauchy", and `load` builds it again. Loading looks names up here and imports
nothing that a file names, so a file can build registered classes only. The registry is open: a class of your own is
saved, loaded and found by its name like a built-in one, once its module is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from bayeslim.errors import NotRegistered, closest

T = TypeVar("T", bound=Callable[..., Any])

KINDS = (
    "method",
    "posterior",
    "prior",
    "distribution",
    "likelihood",
    "family",
    "gate",
    "schedule",
    "criterion",
    "network",
)
"""The kinds of things that have names. A "network" is a function that builds one; all others are classes."""

_NAME_ATTRIBUTES = {"posterior": "kind"}

_ENTRIES: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}

_LOADERS: list[Callable[[], None]] = []


def load_with(loader: Callable[[], None]) -> None:
    """Call a function before a lookup that needs all that the library registers."""
    _LOADERS.append(loader)


def register(kind: str, name: str | None = None) -> Callable[[T], T]:
    """Enter the decorated class or function into the registry.

    Args:
        kind: one of `KINDS`.
        name: the name to save it under. By default its attribute `name` (a posterior's `kind`), or else its own name in
            lower case.
    """
    entries = _entries(kind)

    def enter(thing: T) -> T:
        given = name or getattr(thing, _NAME_ATTRIBUTES.get(kind, "name"), None) or thing.__name__.lower()
        if not isinstance(given, str):
            raise TypeError(f"The name of a {kind} must be a string. Got {given!r}.")
        other = entries.get(given)
        # The same definition may run twice, as a cell of a notebook does: the later one counts.
        if other is not None and _origin(other) != _origin(thing):
            raise ValueError(
                f'The {kind} name "{given}" belongs to {".".join(_origin(other))} already. '
                f"Give {'.'.join(_origin(thing))} another name."
            )
        entries[given] = thing
        return thing

    return enter


def unregister(kind: str, name: str) -> None:
    """Take a name out of the registry again; a name that is not there is no error."""
    _entries(kind).pop(name, None)


def registered(kind: str, name: str) -> Any:
    """Look up what is registered under a name.

    >>> registered("prior", "normal").__name__
    'Normal'
    """
    entries = _entries(kind)
    if name not in entries:
        _load()
    if name not in entries:
        alike = closest(str(name), entries)
        hint = f"The closest names are {alike}." if alike else f"Registered names: {', '.join(sorted(entries))}."
        raise NotRegistered(
            f'There is no {kind} called "{name}". {hint} '
            f'Import the module that defines it, and decorate it with @bl.register("{kind}").'
        )
    return entries[name]


def all_registered(kind: str) -> Mapping[str, Any]:
    """List everything of a kind by name: a view, which shows later additions too."""
    _load()
    return entered(kind)


def entered(kind: str) -> Mapping[str, Any]:
    """List by name what imported modules have registered of a kind: a view."""
    return MappingProxyType(_entries(kind))


def entry_of(value: object) -> tuple[str, str] | None:
    """Find the kind and the name of an object's class; None if it is not registered."""
    for kind, entries in _ENTRIES.items():
        for name, cls in entries.items():
            if type(value) is cls:
                return kind, name
    return None


def _load() -> None:
    for loader in _LOADERS:
        loader()


def _entries(kind: str) -> dict[str, Any]:
    if kind not in _ENTRIES:
        raise ValueError(f"A kind must be one of {', '.join(KINDS)}. Got {kind!r}.")
    return _ENTRIES[kind]


def _origin(thing: Any) -> tuple[str, str]:
    return thing.__module__, thing.__qualname__
