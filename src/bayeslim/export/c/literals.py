"""Numbers and arrays as C source."""

from __future__ import annotations

import math
from collections.abc import Iterable

MAX_LINE_CHARACTERS = 116


def literal(value: float) -> str:
    """Write a float32 number such that a C compiler reads it back to the bit.

    >>> literal(0.1), literal(-2.0), literal(1e-20), literal(-math.inf)
    ('0.1f', '-2.0f', '1e-20f', '-INFINITY')

    Nine digits identify every float32 number.
    """
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    text = f"{value:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def integer_type(largest: int) -> str:
    """Choose the smallest unsigned type that holds all integers up to `largest`."""
    return "uint8_t" if largest < 1 << 8 else "uint16_t" if largest < 1 << 16 else "uint32_t"


def array(kind: str, name: str, values: Iterable[str]) -> str:
    """Write the definition of a constant array."""
    items, lines, line = list(values), list[str](), "   "
    for item in items:
        if len(line) + len(item) + 2 > MAX_LINE_CHARACTERS:
            lines.append(line)
            line = "   "
        line += f" {item},"
    return "\n".join([f"static const {kind} {name}[{len(items)}] = {{", *lines, line, "};", ""])
