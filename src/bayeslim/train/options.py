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

AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)


def check_values(options: Mapping[str, Any]) -> None:
    """Raise if an option of `fit` has an impossible value.

    Options that are not given, or None, are not checked.

    Raises:
        TypeError: for a value of the wrong type.
        ValueError: for a value out of range.
        BayeslimError: for a checkpoint that cannot be written.
    """
    checks: dict[str, Callable[[Any], None]] = {
        "epochs": _check_epochs,
        "lr": _check_lr,
        "clip": _check_clip,
        "patience": _check_patience,
        "accumulate": _check_accumulate,
        "autocast": _check_autocast,
        "compile": _check_compile,
        "seed": _check_seed,
        "device": _check_device,
        "checkpoint": _check_writable,
    }
    for name, check in checks.items():
        if options.get(name) is not None:
            check(options[name])


def check_names(
    owner: str, options: Mapping[str, Any], train: Callable[..., Any], refused: Mapping[str, str] | None = None
) -> None:
    """Raise for options that training does not have, or that a method refuses.

    Args:
        owner: the name of the method.
        options: the options that the method passes on to training.
        train: the function that trains; its keyword arguments are the known options.
        refused: options that the method sets itself, each with the reason.
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


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check_epochs(epochs: Any) -> None:
    if not _is_number(epochs, Integral) or epochs < 1:
        raise ValueError(f"epochs must be a whole number, at least 1. Got {epochs!r}.")


def _check_lr(lr: Any) -> None:
    if isinstance(lr, Tensor):
        return
    if not _is_number(lr, Real):
        raise TypeError(f"lr must be a number, such as 1e-3. Got {lr!r}.")
    if not 0 <= lr < math.inf:
        raise ValueError(f"lr must be finite and not negative. Got {lr}.")


def _check_clip(clip: Any) -> None:
    if not _is_number(clip, Real):
        raise TypeError(f"clip is the largest norm of the gradient, a number. Got {clip!r}.")
    if not 0 < clip < math.inf:
        raise ValueError(f"clip is the largest norm of the gradient and must be positive and finite. Got {clip}.")


def _check_patience(patience: Any) -> None:
    if not _is_number(patience, Integral) or patience < 1:
        raise ValueError(f"patience is a number of epochs, at least 1. Got {patience!r}.")


def _check_accumulate(accumulate: Any) -> None:
    if not _is_number(accumulate, Integral) or accumulate < 1:
        raise ValueError(f"accumulate is a number of batches, at least 1. Got {accumulate!r}.")


def _check_autocast(autocast: Any) -> None:
    if autocast not in AUTOCAST_DTYPES:
        raise TypeError(f"autocast must be {' or '.join(map(str, AUTOCAST_DTYPES))}. Got {autocast!r}.")


def _check_compile(compile: Any) -> None:
    if not isinstance(compile, bool) and compile != "auto":
        raise ValueError(f'compile must be "auto", True or False. Got {compile!r}.')


def _check_seed(seed: Any) -> None:
    if not _is_number(seed, Integral):
        raise TypeError(f"seed must be a whole number. Got {seed!r}.")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit into 64 bits. Got {seed}.")


def _check_device(device: Any) -> None:
    chosen = chosen_device(device)
    try:
        torch.empty((), device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f'device="{chosen}" is not available here: {reason} Use device="auto" for a GPU if there is one, or "cpu".'
        ) from error


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
