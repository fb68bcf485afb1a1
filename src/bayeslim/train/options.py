"""Checks of the options of `fit`, made before anything is changed."""

from __future__ import annotations

import inspect
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.errors import BayeslimError, ShapeMismatch, closest
from bayeslim.train.distributed import rank_and_world
from bayeslim.types import chosen_device


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_whole(value) and value >= 1


RULES: dict[str, list[tuple[type[Exception], Callable[[Any], bool], str]]] = {
    "epochs": [(ValueError, _is_positive, "must be a whole number, at least 1")],
    "lr": [
        (TypeError, lambda lr: isinstance(lr, Tensor) or _is_real(lr), "must be a number, such as 1e-3"),
        (ValueError, lambda lr: isinstance(lr, Tensor) or 0 <= lr < math.inf, "must be finite and not negative"),
    ],
    "clip": [
        (TypeError, _is_real, "is the largest norm of the gradient, a number"),
        (ValueError, lambda c: 0 < c < math.inf, "is the largest norm of the gradient and must be positive and finite"),
    ],
    "patience": [(ValueError, _is_positive, "is a number of epochs, at least 1")],
    "accumulate": [(ValueError, _is_positive, "is a number of batches, at least 1")],
    "autocast": [
        (TypeError, lambda d: d in (torch.bfloat16, torch.float16), "must be torch.bfloat16 or torch.float16"),
    ],
    "compile": [(ValueError, lambda c: isinstance(c, bool) or c == "auto", 'must be "auto", True or False')],
    "seed": [
        (TypeError, _is_whole, "must be a whole number"),
        (ValueError, lambda seed: -(2**63) <= seed < 2**63, "must fit into 64 bits"),
    ],
}
"""The error of an option of `fit`, the check that it fails, and what was needed."""


def check_values(options: Mapping[str, Any]) -> None:
    """Raise if an option of `fit` has an impossible value.

    Options that are not given, or None, are not checked.

    Raises:
        TypeError: for a value of the wrong type.
        ValueError: for a value out of range.
        BayeslimError: for a checkpoint that cannot be written.
    """
    given = {name: options[name] for name in options if options[name] is not None}
    for name, rules in RULES.items():
        for error, fits, words in rules if name in given else ():
            if not fits(given[name]):
                raise error(f"{name} {words}. Got {given[name]!r}.")
    if "device" in given:
        chosen_device(given["device"])
    if "checkpoint" in given:
        _check_writable(given["checkpoint"])


def check_names(
    owner: str, options: Mapping[str, Any], train: Callable[..., Any], refused: Mapping[str, str] | None = None
) -> None:
    """Raise for options that `train` does not have, or that a method refuses.

    Refused options are those that the method sets itself, each with the reason.
    """
    known = [name for name, p in inspect.signature(train).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            alike = closest(name, known)
            hint = f"Did you mean {alike}?" if alike else f"The options are {', '.join(known)}."
            raise TypeError(f"{owner}.fit has no option {name!r}. {hint}")
    for name, reason in (refused or {}).items():
        if options.get(name) is not None:
            raise ValueError(f"{owner} takes no {name}: {reason}.")


def check_batch(model: nn.Module, batch: Any) -> None:
    """Raise if a batch is a tuple with more inputs than the network takes."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 3:
        return
    try:
        inspect.signature(model.forward).bind(*batch[:-1])
    except TypeError as error:
        raise ShapeMismatch(
            f"A batch of {len(batch)} is taken as {len(batch) - 1} inputs and the targets, and the network does not "
            f"take these: {error}. Yield (inputs, targets), or (inputs_1, inputs_2, ..., targets) to fit its forward."
        ) from error
    except ValueError:  # a forward without a signature
        return


def _check_writable(checkpoint: str | os.PathLike[str]) -> None:
    if rank_and_world()[0] != 0:  # the first rank writes
        return
    try:
        folder = Path(checkpoint)
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if is_new:
            folder.rmdir()  # a run that fails before its first checkpoint leaves none
    except (OSError, TypeError) as error:
        raise BayeslimError(
            f"checkpoint must be a folder that can be written to. Got {str(checkpoint)!r}: {error}. Choose another."
        ) from error
