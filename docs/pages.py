"""The pages made when the site is built: one for every method, benchmarks, the gallery, and the API reference."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import benchmark_page
import gallery_page
import reference
from rst import as_rst_lines


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
    _put(folder / "benchmarks.md", benchmark_page.write(folder / "plots"))
    _put(folder / "gallery.rst", gallery_page.write(folder / "gallery"))
    _put(folder / "api" / "index.rst", _api_index(methods))
    for name in (*reference.NAMESPACES, *reference.BRIDGES):
        _put(folder / "api" / f"{name}.rst", _namespace_page(name))


def _methods() -> dict[str, type]:
    """List the public methods by name."""
    return {name: value for name, value in _listed(".").items() if name in reference.METHOD_NOTES}


def _listed(name: str) -> dict[str, Any]:
    return dict(sorted(reference.public(name).items(), key=lambda item: item[0].lower()))


def _method_page(name: str, method: type) -> str:
    """Build the page of a method: its file's docstring, the notes, and its settings."""
    module = sys.modules[method.__module__]
    notes = reference.METHOD_NOTES[name]
    parts = [name, "=" * len(name), "", *as_rst_lines((inspect.getdoc(module) or "").splitlines()), ""]
    for title, key in (("When to use it", "when"), ("Cost", "cost"), ("When it goes wrong", "trouble")):
        parts += [title, "-" * len(title), "", *as_rst_lines([notes[key]]), ""]
    parts += ["Example", "-------", "", *_code(notes["example"])]
    return "\n".join([*parts, "Settings", "--------", "", f".. autoclass:: bayeslim.{name}", ""])


def _summary(value: Any) -> str:
    return " ".join(as_rst_lines((inspect.getdoc(value) or "").split("\n\n")[0].splitlines())).strip()


def _api_index(methods: dict[str, type]) -> str:
    values = {name: value for name, value in _listed(".").items() if name not in methods}
    listed = "\n".join(f"   {name}" for name in (*reference.NAMESPACES, *reference.BRIDGES))
    parts = ["API reference", "=============", "", "All examples below and in the namespaces start from this code:", ""]
    parts += [*_code(reference.START), "Functions", "---------", ""]
    parts += _entries(".", {name: value for name, value in values.items() if not inspect.isclass(value)})
    parts += ["Classes", "-------", "", "Methods of inference have :doc:`pages of their own </methods/index>`.", ""]
    parts += _entries(".", {name: value for name, value in values.items() if inspect.isclass(value)})
    return "\n".join([*parts, "Namespaces", "----------", "", ".. toctree::", "   :maxdepth: 1", "", listed, ""])


def _namespace_page(name: str) -> str:
    module = reference.namespace(name)
    title = module.__name__ if name in reference.BRIDGES else f"bl.{name}"
    body = as_rst_lines((inspect.getdoc(module) or "").splitlines())
    return "\n".join([title, "=" * len(title), "", *body, "", *_entries(name, reference.public(name))])


def _entries(name: str, values: dict[str, Any]) -> list[str]:
    """Document names of a namespace; those that share an example stand together, before it."""
    examples = {one: (names, code) for names, code in reference.EXAMPLES.get(name, {}).items() for one in names}
    lines: list[str] = []
    left = list(values)
    while left:
        names, code = examples.get(left[0], ((left[0],), None))
        here = [one for one in names if one in left]
        for one in here:
            kind, options = ("autoclass", ["   :members:"]) if inspect.isclass(values[one]) else ("autofunction", [])
            options += ["   :no-index:"] if name != "." else []
            lines += [f".. {kind}:: {reference.namespace(name).__name__}.{one}", *options, ""]
        lines += [f"   {line}" for line in ("Example:", "", *_code(code))] if code else []  # inside the last of them
        left = [one for one in left if one not in here]
    return lines


def _code(code: str) -> list[str]:
    return [".. code-block:: python", "", *(f"   {line}" for line in code.strip().splitlines()), ""]


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
