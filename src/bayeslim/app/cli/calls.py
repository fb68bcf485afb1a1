"""Names with arguments, as a person writes them: `laplace`, `mlp(hidden=100)`, `package.module:factory(depth=2)`.

Arguments are literals (numbers, inf, strings, lists, None, True and False), or calls of the parts that a setting may
have, `variational(kl_schedule=warmup(end=5))`. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bayeslim.errors import BayeslimError, closest


class BadSetting(BayeslimError, ValueError):
    """A setting of the command line or of its configuration file that cannot be used."""


@dataclass(frozen=True)
class Call:
    """A name with arguments.

    Attributes:
        text: as it was written.
        module: the part before the colon; "" if there is none.
        name: the name to call.
        args: positional arguments.
        kwargs: keyword arguments; None if there are no brackets at all.
    """

    text: str
    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None

    def of(self, table: Mapping[str, Callable[..., Any]], what: str, kind: str | None = None) -> Any:
        """Call the entry of a table that has the name; `what` is the setting, for errors."""
        name = next((known for known in table if _plain(known) == _plain(self.name)), None)
        if name is None:
            hint = closest(self.name, table)
            raise BadSetting(
                f'{what}="{self.text}": there is no {kind or what} called "{self.name}".'
                f"{f' Closest: {hint}.' if hint else ''} There are: {', '.join(sorted(table))}"
                f"{_IMPORT_HINT.get(kind or what, '')}."
            )
        try:
            return self._called(table[name], what)
        except BayeslimError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # arguments of a wrong kind, or far too large
            raise BadSetting(f'{what}="{self.text}": {first_line(error)}') from error

    def imported(self, what: str) -> Any:
        """Import the name from its module, and call it if it is a class or a function.

        Any other object is returned as it is.

        Raises:
            BadSetting: for the standard library's modules, classes and functions, none of which makes networks or data.
        """
        if _is_standard(self.module):
            raise BadSetting(f'{what}="{self.text}": {self.module} is part of Python. Name a module of your own.')
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as python itself does for a script that is started here
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            raise BadSetting(
                f'{what}="{self.text}": {error}. Start the command in the folder that holds the module, or install it.'
            ) from error
        if not hasattr(module, self.name):
            hint = closest(self.name, vars(module))
            raise BadSetting(
                f'{what}="{self.text}": {self.module} has no "{self.name}".{f" Closest: {hint}." if hint else ""}'
            )
        found = getattr(module, self.name)
        if not isinstance(found, type) and (not callable(found) or hasattr(found, "named_parameters")):
            return found
        factory = inspect.unwrap(found)
        if not inspect.isclass(factory) and not inspect.isroutine(factory):
            raise BadSetting(
                f'{what}="{self.text}" must name a class or a function. Got {type(found).__name__}: wrap it in a '
                "function."
            )
        if _is_standard(getattr(factory, "__module__", None) or "builtins"):
            raise BadSetting(
                f'{what}="{self.text}": {self.name} is part of Python, which {self.module} only imports. Name a class '
                "or a function of your own."
            )
        return self._called(found, what)

    def _called(self, function: Callable[..., Any], what: str) -> Any:
        kwargs = self.kwargs or {}
        try:
            inspect.signature(function).bind(*self.args, **kwargs)
        except TypeError as error:
            raise BadSetting(f'{what}="{self.text}": {error}.') from error
        except ValueError:
            pass  # without a signature there is nothing to check
        return function(*self.args, **kwargs)


_IMPORT_HINT = {"model": ', or "package.module:factory"', "data": ', or "package.module:loaders"'}


def _is_standard(module: str) -> bool:
    """Check whether a module belongs to Python's standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names


def _plain(name: str) -> str:
    return name.replace("-", "_")


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def parse(text: str, what: str, parts: Mapping[str, Callable[..., Any]] | None = None) -> Call:
    """Parse a name with arguments; `what` is the setting, for errors.

    >>> parse("mlp(hidden=100)", "model").kwargs
    {'hidden': 100}
    >>> parse("variational(renyi=-inf)", "method").kwargs
    {'renyi': -inf}
    >>> parse("nets.small:build", "model").module
    'nets.small'

    The arguments may call `parts` by name.
    """
    head, bracket, rest = text.partition("(")
    module, colon, name = head.strip().rpartition(":")
    try:
        call = ast.parse(f"f({rest}" if bracket else "f()", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("more than one call")
        args, kwargs = _arguments(call, text, what, parts or {})
    except BadSetting:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadSetting(
            f'{what}="{text}" cannot be read: write a name, or a call with plain arguments such as "mlp(hidden=100)".'
        ) from error
    names = [*module.split("."), name] if colon else [name]
    if not all(part.replace("-", "_").isidentifier() for part in names):
        raise BadSetting(f'{what}="{text}" cannot be read: "{head}" is neither a name nor package.module:name.')
    return Call(text, module, name, args, kwargs if bracket else None)


def _arguments(
    call: ast.Call, text: str, what: str, parts: Mapping[str, Callable[..., Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("arguments without a name")

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and _is_infinity(node.operand):
            return -math.inf
        if _is_infinity(node):
            return math.inf
        if not parts or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return ast.literal_eval(node)
        inner = Call(text, "", node.func.id, *_arguments(node, text, what, parts))
        return inner.of(parts, what, "part")

    return tuple(map(value, call.args)), {str(keyword.arg): value(keyword.value) for keyword in call.keywords}


def _is_infinity(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "inf"
