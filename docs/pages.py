"""The pages made when the site is built: one for every method, benchmarks, the gallery, and the API reference."""

from __future__ import annotations

import importlib
import inspect
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import benchmark_page
import gallery_page
from rst import as_rst_lines

import bayeslim as bl

NOTES = tomllib.loads((Path(__file__).parent / "method_notes.toml").read_text(encoding="utf-8"))
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


def write(folder: Path) -> None:
    """Write all generated pages below a folder."""
    methods = _methods()
    for name, method in methods.items():
        _put(folder / "methods" / f"{name}.rst", _method_page(name, method))
    listed = "\n".join(f"   {name}" for name in methods)
    rows = "\n".join(f"   * - :doc:`{name}`\n     - {_summary(method)}" for name, method in methods.items())
    intro = "Every page is made from the method's own file: its equation, its paper, its settings."
    table = f".. list-table::\n   :widths: 25 75\n\n{rows}"
    _put(
        folder / "methods" / "index.rst",
        f"Methods\n=======\n\n{intro}\n\n{table}\n\n.. toctree::\n   :hidden:\n\n{listed}\n",
    )
    _put(folder / "benchmarks.rst", benchmark_page.write(folder / "plots"))
    _put(folder / "gallery.rst", gallery_page.write(folder / "gallery"))
    _put(folder / "api" / "index.rst", _api_index(methods))
    for name in NAMESPACES:
        if hasattr(bl, name):
            _put(folder / "api" / f"{name}.rst", _namespace_page(f"bl.{name}", getattr(bl, name)))
    for name in BRIDGES:
        module = importlib.import_module(f"bayeslim.{name}")
        _put(folder / "api" / f"{name}.rst", _namespace_page(module.__name__, module))


def _methods() -> dict[str, type]:
    """List the public methods by name."""
    found = {name: getattr(bl, name) for name in bl.__all__}
    return {
        name: value
        for name, value in sorted(found.items(), key=lambda item: item[0].lower())
        if inspect.isclass(value) and issubclass(value, bl.Method) and value is not bl.Method
    }


def _method_page(name: str, method: type) -> str:
    """Build the page of a method: its file's docstring, the notes, and its settings."""
    module = sys.modules[method.__module__]
    notes = NOTES[name]
    parts = [name, "=" * len(name), "", *as_rst_lines((inspect.getdoc(module) or "").splitlines()), ""]
    for title, key in (("When to use it", "when"), ("Cost", "cost"), ("When it goes wrong", "trouble")):
        parts += [title, "-" * len(title), "", *as_rst_lines([notes[key]]), ""]
    code = [f"   {line}" for line in notes["example"].strip().splitlines()]
    parts += ["Example", "-------", "", ".. code-block:: python", "", *code, ""]
    return "\n".join([*parts, "Settings", "--------", "", f".. autoclass:: bayeslim.{name}", ""])


def _summary(value: Any) -> str:
    return " ".join(as_rst_lines((inspect.getdoc(value) or "").split("\n\n")[0].splitlines())).strip()


def _api_index(methods: dict[str, type]) -> str:
    values = {name: getattr(bl, name) for name in sorted(bl.__all__, key=str.lower)}
    functions = [name for name, value in values.items() if inspect.isfunction(value)]
    classes = [name for name, value in values.items() if inspect.isclass(value) and name not in methods]
    parts = ["API reference", "=============", "", "Functions", "---------", ""]
    parts += [f".. autofunction:: bayeslim.{name}\n" for name in functions]
    parts += ["Classes", "-------", "", "Methods of inference have :doc:`pages of their own </methods/index>`.", ""]
    parts += [f".. autoclass:: bayeslim.{name}\n   :members:\n" for name in classes]
    listed = "\n".join(f"   {name}" for name in (*(n for n in NAMESPACES if hasattr(bl, n)), *BRIDGES))
    return "\n".join([*parts, "Namespaces", "----------", "", ".. toctree::", "   :maxdepth: 1", "", listed, ""])


def _namespace_page(title: str, namespace: ModuleType) -> str:
    body = "\n".join(as_rst_lines((inspect.getdoc(namespace) or "").splitlines()))
    names = getattr(namespace, "__all__", None) or [
        key
        for key, value in vars(namespace).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == namespace.__name__
    ]
    entries = []
    for key in names:
        value = getattr(namespace, key)
        if inspect.isclass(value):
            entries.append(f".. autoclass:: {namespace.__name__}.{key}\n   :members:\n   :no-index:\n")
        elif callable(value):
            entries.append(f".. autofunction:: {namespace.__name__}.{key}\n   :no-index:\n")
    return f"{title}\n{'=' * len(title)}\n\n{body}\n\n" + "\n".join(entries)


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
