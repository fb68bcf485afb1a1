"""Export as a PyTorch program (.pt2), which `torch.export.load` runs without the class of the network.

Reading a .pt2 file unpickles parts of it: load only files you trust. `bayeslim.save` writes folders that are safe.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch import nn

from bayeslim.errors import UnsupportedModel
from bayeslim.export.check import first_line, prove, split
from bayeslim.export.quiet import quiet
from bayeslim.types import Inputs, arguments


def to_program(network: nn.Module, inputs: Sequence[Inputs], tolerance: float) -> tuple[bytes, float]:
    """A network as the content of a .pt2 file, checked, and the largest difference found.

    Args:
        network: in eval mode, on the CPU.
        inputs: what to trace it on, and then to check it on.
        tolerance: the relative difference allowed.
    """
    args, kwargs, free = split(inputs[0])
    content = io.BytesIO()
    with quiet():
        try:
            program = torch.export.export(network, args, kwargs, dynamic_shapes=free, strict=False)
        except Exception as error:
            raise UnsupportedModel(
                f"torch.export cannot trace {type(network).__name__}: {first_line(error)} "
                "It needs a forward without data-dependent control flow."
            ) from error
        # neither the example nor where the code lies belongs into a file that is passed on
        program.example_inputs = None
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)
        torch.export.save(program, content)
        content.seek(0)
        again = torch.export.load(content).module()

    def run(example: Inputs) -> object:
        args, kwargs = arguments(example)
        with torch.no_grad():
            return again(*args, **kwargs)

    return content.getvalue(), prove(network, run, inputs, ".pt2", tolerance)
