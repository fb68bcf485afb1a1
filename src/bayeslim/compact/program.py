"""Tracing with `torch.export`, with a dynamic batch size where possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bayeslim.compact.example import rows_of, takes
from bayeslim.compact.quiet import quiet
from bayeslim.errors import UnsupportedModel
from bayeslim.stochastic import own_layers
from bayeslim.types import Inputs, arguments


def exported(network: nn.Module, inputs: Sequence[Inputs]) -> torch.export.ExportedProgram:
    """Trace a network with `torch.export`, with a dynamic batch size if possible.

    Args:
        network: in eval mode, on the CPU.
        inputs: the inputs to trace on, and others that the program should take as well.

    Raises:
        UnsupportedModel: if it cannot be traced.
    """
    args, kwargs, free = split(inputs[0])
    program, failure = None, None
    # The non-strict mode makes a constant of len(x); the strict mode, which reads the bytecode, does not.
    for strict in (False, True):
        try:
            with quiet(), own_layers():
                found = torch.export.export(network, args, kwargs, dynamic_shapes=free, strict=strict)
        except Exception as error:
            failure = failure or error
            continue
        program = program or found
        if all(takes(found.module(), other) for other in inputs[1:]):
            return found
    if program is None:
        assert failure is not None
        raise UnsupportedModel(
            f"torch.export cannot trace {type(network).__name__}: {first_line(failure)} "
            "It needs a forward without data-dependent control flow."
        ) from failure
    return program


def split(example: Inputs) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Split inputs into arguments, keyword arguments and `dynamic_shapes`."""
    args, kwargs = arguments(example)
    rows = rows_of(example)
    try:
        free = pytree.tree_map(
            lambda x: {0: torch.export.Dim.AUTO} if torch.is_tensor(x) and x.ndim and x.shape[0] == rows > 1 else None,
            (args, kwargs),
        )
    except AssertionError:  # a packed sequence
        return args, kwargs, None
    return args, kwargs, free[0] or free[1]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else repr(error)
