"""Activations as C expressions of `v`, and which of PyTorch's operations they are."""

from __future__ import annotations

from bayeslim.export.c.literals import literal
from bayeslim.export.c.steps import Activation

EXPRESSIONS = {
    "relu": "v < 0.0f ? 0.0f : v",
    "clamp": "v < {0} ? {0} : v > {1} ? {1} : v",
    "leaky_relu": "v < 0.0f ? {0} * v : v",
    "elu": "v < 0.0f ? {0} * expm1f({2} * v) : {1} * v",
    "gelu": "0.5f * v * (1.0f + erff(v * 0.70710678f))",
    "gelu_tanh": "0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)))",
    "sigmoid": "1.0f / (1.0f + expf(-v))",
    "tanh": "tanhf(v)",
    "silu": "v / (1.0f + expf(-v))",
    "softplus": "{0} * v > {1} ? v : log1pf(expf({0} * v)) / {0}",
    "hardsigmoid": "v < -3.0f ? 0.0f : v > 3.0f ? 1.0f : v / 6.0f + 0.5f",
    "hardswish": "v * (v < -3.0f ? 0.0f : v > 3.0f ? 1.0f : v / 6.0f + 0.5f)",
    "abs": "v < 0.0f ? -v : v",
    "scale": "{0} * v + {1}",
}
"""The comparisons are written so that NaN stays NaN."""

NEEDS_MATH_LIBRARY = ("expm1f", "erff", "tanhf", "expf", "log1pf", "logf")


def assignment(value: str, activation: Activation | None) -> str:
    """Write the statements that set `v` to a value, and then to an activation of it."""
    statement = f"float v = {value};"
    if activation is not None:
        statement += f" v = {EXPRESSIONS[activation.kind].format(*map(literal, activation.constants))};"
    return statement
