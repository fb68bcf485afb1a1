"""The pages that are made from docstrings: one for every method, and the API reference."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import bayeslim as bl

SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:", "Example:", "Examples:")
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
    _put(folder / "api" / "index.rst", _api_index(methods))
    for name in NAMESPACES:
        if hasattr(bl, name):
            _put(folder / "api" / f"{name}.rst", _namespace_page(name, getattr(bl, name)))


def _methods() -> dict[str, type]:
    """List the public methods by name."""
    found = {name: getattr(bl, name) for name in bl.__all__}
    return {
        name: value
        for name, value in sorted(found.items(), key=lambda item: item[0].lower())
        if inspect.isclass(value) and issubclass(value, bl.Method) and value is not bl.Method
    }


def _method_page(name: str, method: type) -> str:
    module = sys.modules[method.__module__]
    lines = as_rst_lines((inspect.getdoc(module) or "").splitlines())
    body = "\n".join(lines)
    return f"{name}\n{'=' * len(name)}\n\n{body}\n\n.. autoclass:: bayeslim.{name}\n"


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
    listed = "\n".join(f"   {name}" for name in NAMESPACES if hasattr(bl, name))
    return "\n".join([*parts, "Namespaces", "----------", "", ".. toctree::", "   :maxdepth: 1", "", listed, ""])


def _namespace_page(name: str, namespace: ModuleType) -> str:
    title = f"bl.{name}"
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


def as_rst(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Turn a docstring with code in single backticks into reStructuredText, in place."""
    lines[:] = as_rst_lines(lines)


def as_rst_lines(lines: list[str]) -> list[str]:
    """Escape characters that reStructuredText would read as markup, and keep indented equations as they are."""
    out: list[str] = []
    in_section = in_doctest = in_block = False
    for line in lines:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if indent == 0 and text:
            in_section = text in SECTIONS
        if not text:
            in_doctest = False
            out.append("")
            continue
        if text.startswith(">>>") or in_doctest:
            if not in_doctest and out and out[-1]:
                out.append("")
            in_doctest = True
            out.append(line)
            continue
        is_block = indent >= 4 and not in_section
        if is_block and not in_block:
            out += [*([""] if out and out[-1] else []), ".. code-block:: text", ""]
        if not is_block and in_block and out[-1]:
            out.append("")
        in_block = is_block
        out.append(line if is_block else _escaped(line))
    return out


def _escaped(line: str) -> str:
    parts = re.split(r"(`[^`]*`)", line)
    for place in range(1, len(parts), 2):
        if parts[place + 1][:1].isalnum():  # a plural `s` right after code
            parts[place] += "\\ "
    return "".join(
        part if part.startswith("`") else re.sub(r"(?<=\w)_(?=\W|$)", r"\\_", re.sub(r"([|*])", r"\\\1", part))
        for part in parts
    )


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
