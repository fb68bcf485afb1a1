"""The cost of a network: parameters, non-zeros, FLOPs and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bayeslim.attention import ExplicitAttention
from bayeslim.compact.example import run_example
from bayeslim.compact.sparse import stored_bytes
from bayeslim.compact.trace import evaluating_copy
from bayeslim.types import Inputs, to_device


@dataclass(frozen=True, repr=False)
class Cost:
    """The cost of a network.

    Attributes:
        parameters: their number, tied ones counted once.
        nonzeros: the number of parameters that are not zero.
        flops: additions and multiplications of matrix products and convolutions in one call on the example.
        bytes: parameters and buffers on disk, zeros stored sparsely.
    """

    parameters: int
    nonzeros: int
    flops: int
    bytes: int

    def __repr__(self) -> str:
        return (
            f"Cost: {self.parameters:,} parameters, {self.nonzeros:,} non-zero, "
            f"{self.flops / 1e6:,.4g} MFLOP a call, {self.bytes / 1024:,.4g} KiB"
        )


def cost(model: nn.Module, example: Inputs) -> Cost:
    """Count the parameters, FLOPs and bytes of a network on an example.

    Args:
        model: the network. It is not changed.
        example: inputs: a tensor, a tuple of arguments or a dict.

    Raises:
        ShapeMismatch: if the network does not run on the example.

    >>> cost(nn.Linear(8, 4), torch.zeros(1, 8))
    Cost: 36 parameters, 36 non-zero, 6.4e-05 MFLOP a call, 0.1406 KiB
    """
    network = evaluating_copy(model).cpu()
    parameters = list(network.parameters())
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops})
    with ExplicitAttention(), counter:
        run_example(network, to_device(example, "cpu"))
    return Cost(
        parameters=sum(p.numel() for p in parameters),
        nonzeros=sum(int(p.count_nonzero()) for p in parameters),
        flops=int(counter.get_total_flops()),
        bytes=stored_bytes(_stored(network)),
    )


def _recurrent_flops(inputs: Sequence[int], below: Sequence[int], past: Sequence[int], *args: Any, **_: Any) -> int:
    """Count the FLOPs of one recurrent layer in one direction."""
    return 2 * math.prod(inputs[:-1]) * (math.prod(below) + math.prod(past))


def _stored(network: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with each tied tensor once."""
    unique = {id(tensor): name for name, tensor in reversed(network.state_dict(keep_vars=True).items())}
    return {name: tensor for name, tensor in network.state_dict(keep_vars=True).items() if unique[id(tensor)] == name}
