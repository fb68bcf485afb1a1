"""Errors that say what was needed, what was given, and what to do; and the checks of numbers that many share.

Every error that the library raises on purpose is a `BayeslimError`. Each also inherits from the built-in exception a
caller would expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any


class BayeslimError(Exception):
    """The base of every error raised on purpose by bayeslim."""


class NoSiteMatched(BayeslimError, ValueError):
    """A selection of parameters matched nothing."""


class UnsupportedModel(BayeslimError, TypeError):
    """The model has a property that a method or verb cannot work with."""


class ShapeMismatch(BayeslimError, ValueError):
    """Tensors do not fit together."""


class NotFitted(BayeslimError, RuntimeError):
    """Something was asked for that only exists after `fit`."""


class MissingDataSize(BayeslimError, ValueError):
    """The number of training examples is needed to scale the loss and is unknown."""


class NotFinite(BayeslimError, ValueError):
    """Inputs, weights or predictions are NaN or infinite."""


class NonFiniteLoss(BayeslimError, ArithmeticError):
    """The training loss became infinite or not a number."""


class ImproperPrior(BayeslimError, ValueError):
    """An evidence was asked for under a prior that does not integrate to one."""


class NotPositiveDefinite(BayeslimError, ArithmeticError):
    """A precision has directions of zero or negative curvature: no covariance exists."""


class NotRegistered(BayeslimError, ValueError):
    """A name was looked up that no registered class or function has."""


class CorruptFile(BayeslimError, ValueError):
    """A file is truncated, foreign, of another version, or does not fit the model."""


class FolderInUse(BayeslimError):
    """Another process, or another thread, is writing to the folder."""


class DownloadFailed(BayeslimError, OSError):
    """A data set could not be fetched."""


class MissingExtra(BayeslimError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, what: str):
        super().__init__(f"{what} needs {package}, which is not installed. Run: pip install 'bayeslim[{extra}]'")


class BayeslimWarning(UserWarning):
    """Something works, but probably not as intended."""


def closest(wanted: str, names: Iterable[str], n: int = 3) -> str:
    """List the names most like `wanted`, quoted and joined, for error messages.

    >>> closest("encoder.weight", ["encoders.0.weight", "head.bias"])
    '"encoders.0.weight"'
    """
    return ", ".join(f'"{name}"' for name in difflib.get_close_matches(wanted, list(names), n=n, cutoff=0.5))


def check_number(
    name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf, below: float = math.inf
) -> None:
    """Raise unless an argument is a finite number in a range.

    Args:
        name: the argument.
        value: its value.
        above: it must be larger than this.
        least: it must be at least this.
        below: it must be smaller than this.

    Raises:
        TypeError: for another type; True and False are no numbers.
        ValueError: for NaN, infinity and numbers out of range.

    >>> check_number("lr", -0.1, above=0.0)
    Traceback (most recent call last):
    ...
    ValueError: lr must be a finite number above 0. Got -0.1.
    """
    bounds = ((above, "above"), (least, "at least"), (below, "below"))
    limits = [f"{words} {bound:g}" for bound, words in bounds if math.isfinite(bound)]
    needed = f"{name} must be a finite number{' ' if limits else ''}{' and '.join(limits)}. Got {value!r}."
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(needed)
    if not (math.isfinite(value) and above < float(value) < below and float(value) >= least):
        raise ValueError(needed)


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raise a `ValueError` unless an argument is a whole number, at least `least`.

    >>> check_whole("steps", 0)
    Traceback (most recent call last):
    ...
    ValueError: steps must be a whole number, at least 1. Got 0.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}. Got {value!r}.")


def check_settings(settings: Any) -> None:
    """Raise for settings whose values do not fit their annotations.

    A field of type float must be a finite number, int a whole number, and bool True or False; a field with
    `MAY_BE_INFINITE` takes infinity. Fields of other types are not checked, and ranges are not.

    Raises:
        TypeError: for a value of another type.
        ValueError: for NaN and infinity, and for fractions of whole numbers.

    >>> import bayeslim as bl
    >>> bl.Variational(samples=4.5)  # all methods check their settings so
    Traceback (most recent call last):
    ...
    ValueError: samples must be a whole number. Got 4.5.
    """
    for field in fields(settings):
        kind = str(getattr(field.type, "__name__", field.type))
        value: Any = getattr(settings, field.name)
        if value is field.default or (value is None and kind.endswith(" | None")):
            continue
        types, words = _KINDS.get(kind.removesuffix(" | None"), ((object,), ""))
        if not isinstance(value, types) or (isinstance(value, bool) and types in ((Real,), (Integral,))):
            error = ValueError if type(value) is float and types == (Integral,) else TypeError
            raise error(f"{field.name} must be {words}. Got {value!r}.")
        number = float(getattr(settings, field.name)) if types == (Real,) else 0.0
        if math.isnan(number) or (math.isinf(number) and not field.metadata):
            raise ValueError(f"{field.name} must be a finite number. Got {value!r}.")


MAY_BE_INFINITE = {"may_be_infinite": True}
"""The metadata of a field that takes infinity."""

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "float": ((Real,), "a number"),
    "int": ((Integral,), "a whole number"),
    "bool": ((bool,), "True or False"),
}
"""The types that a field of an annotated type may have, and their name."""
