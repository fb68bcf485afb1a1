"""The public names of the library by namespace, and the example of each."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import bayeslim as bl

FOLDER = Path(__file__).parent
NAMESPACES = (
    "priors",
    "likelihoods",
    "families",
    "gates",
    "posteriors",
    "recipes",
    "metrics",
    "diagnostics",
    "samplers",
    "continual",
    "schedules",
    "data",
    "zoo",
    "errors",
)
"""Public namespaces in the order of the reference."""
BRIDGES = ("sklearn", "trainers", "trainers.lightning", "trainers.transformers", "botorch", "activeml")
"""Modules for other libraries, which are imported by name."""
METHOD_NOTES: dict[str, dict[str, str]] = tomllib.loads((FOLDER / "method_notes.toml").read_text(encoding="utf-8"))
_READ = tomllib.loads((FOLDER / "api_examples.toml").read_text(encoding="utf-8"))
START: str = _READ.pop("start")
"""The code that all examples start from."""
EXAMPLES: dict[str, dict[tuple[str, ...], str]] = {
    namespace: {tuple(names.split(", ")): code for names, code in found.items()} for namespace, found in _READ.items()
}
"""By namespace ("." is `bl` itself), and by the names that an example is for."""


def namespace(name: str) -> ModuleType:
    """Import a namespace by its name here."""
    if name == ".":
        return bl
    return importlib.import_module(f"bayeslim.{name}") if name in BRIDGES else getattr(bl, name)


def public(name: str) -> dict[str, Any]:
    """List the public classes and functions of a namespace."""
    module = namespace(name)
    names = getattr(module, "__all__", None) or [
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    found = {key: getattr(module, key) for key in names}
    return {key: value for key, value in found.items() if inspect.isclass(value) or inspect.isfunction(value)}


def without_example(name: str) -> list[str]:
    """List the public names of a namespace that have no example."""
    listed = {one for names in EXAMPLES.get(name, {}) for one in names}
    return [
        key
        for key, value in public(name).items()
        if key not in listed and ">>>" not in (value.__doc__ or "") and not (name == "." and key in METHOD_NOTES)
    ]
