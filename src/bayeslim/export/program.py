"""Export as a PyTorch program (.pt2), which `torch.export.load` runs without the class of the network.

Reading a .pt2 file unpickles parts of it: load only files you trust. `bayeslim.save` writes folders that are safe.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch import nn

from bayeslim.compact.trace import run_example
from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.export.check import first_line, prove, split
from bayeslim.export.quiet import plain_attention, quiet
from bayeslim.types import Inputs


def exported(network: nn.Module, inputs: Sequence[Inputs]) -> torch.export.ExportedProgram:
    """A network as `torch.export` traces it, for batches of any size if the network takes them.

    Args:
        network: in eval mode, on the CPU.
        inputs: what to trace it on, and more, on which the program should run as well.

    Raises:
        UnsupportedModel: if it cannot be traced.
    """
    args, kwargs, free = split(inputs[0])
    program, failure = None, None
    # The plain way takes len(x) for a number that never changes; the strict one, which reads the code, knows better.
    for strict in (False, True):
        try:
            with quiet(), plain_attention():
                found = torch.export.export(network, args, kwargs, dynamic_shapes=free, strict=strict)
        except Exception as error:
            failure = failure or error
            continue
        program = program or found
        try:
            for other in inputs[1:]:
                run_example(found.module(), other)
        except ShapeMismatch:
            continue
        return found
    if program is None:
        assert failure is not None
        raise UnsupportedModel(
            f"torch.export cannot trace {type(network).__name__}: {first_line(failure)} "
            "It needs a forward without data-dependent control flow."
        ) from failure
    return program


def to_program(network: nn.Module, inputs: Sequence[Inputs], tolerance: float) -> tuple[bytes, float]:
    """A network as the content of a .pt2 file, checked, and the largest difference found.

    Args:
        network: in eval mode, on the CPU.
        inputs: what to trace it on, and then to check it on.
        tolerance: the relative difference allowed.
    """
    program, content = exported(network, inputs), io.BytesIO()
    # Neither the example nor the places of the source code belong into a file that is passed on.
    program.example_inputs = None
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    with quiet():
        torch.export.save(program, content)
        content.seek(0)
        again = torch.export.load(content).module()
    return content.getvalue(), prove(network, lambda x: run_example(again, x), inputs, ".pt2", tolerance)
