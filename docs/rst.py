"""Docstrings as reStructuredText: the library writes code in single backticks, and equations as indented blocks."""

from __future__ import annotations

import re
from typing import Any

SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:", "Example:", "Examples:")


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
