"""Export as a PyTorch program (.pt2), which `torch.export.load` reads.

Reading a .pt2 file unpickles parts of it: load only files you trust. `bayeslim.save` writes folders that are safe.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch import nn

from bayeslim.compact.example import run_example
from bayeslim.compact.program import exported
from bayeslim.compact.quiet import quiet
from bayeslim.compact.recurrence import restore_recurrent_
from bayeslim.export.check import prove
from bayeslim.types import Inputs


def to_program(network: nn.Module, inputs: Sequence[Inputs], tolerance: float) -> tuple[bytes, float]:
    """Encode a network as a .pt2 file; return its content and the largest difference."""
    program, content = exported(network, inputs), io.BytesIO()
    # The file is passed on: it holds neither the example nor paths of source code.
    program.example_inputs = None
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    restore_recurrent_(program.graph)
    with quiet():
        torch.export.save(program, content)
        content.seek(0)
        again = torch.export.load(content).module()
    return content.getvalue(), prove(network, lambda x: run_example(again, x), inputs, ".pt2", tolerance)
