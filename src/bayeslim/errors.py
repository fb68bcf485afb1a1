"""Errors that say what was needed, what was given, and what to do.

Every error that the library raises on purpose is a `BayeslimError`. Each also inherits from the built-in exception a
caller would expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
