"""Recurrent layers in evaluation mode, without what their modules do around them.

On ARM CPUs they multiply by BLAS (`blas`): oneDNN is quicker for LSTMs only, of few examples and units.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.blas import IS_ARM, by_blas
from bayeslim.stochastic import plain_type

MANY = 2**18
"""Of how many multiplications in a step LSTMs take less time by BLAS."""

_FUNCTIONS: dict[type[nn.Module], Any] = {nn.LSTM: torch.lstm, nn.GRU: torch.gru}


def is_known(layer: Any) -> bool:
    """Whether `called` does what a layer does."""
    if plain_type(layer) not in _FUNCTIONS or layer.proj_size or layer.training:
        return False
    return bool(layer._parameters.keys() == set(layer._flat_weights_names))


def called(layer: Any, x: Any, states: Any = None) -> Any:
    """What a layer gives for a sequence, and its last states."""
    return type(layer).forward(layer, x, states) if states is not None else continued(layer, begun(layer, x))


def begun(layer: Any, x: Any) -> Any:
    """What a layer computes without its weights: sequences with positions first, and states before them.

    Other inputs are left as they are.
    """
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != layer.input_size:
        return x
    if layer.batch_first:
        x = x.transpose(0, 1).contiguous()
    return x, x.new_zeros(layer.num_layers * (2 if layer.bidirectional else 1), x.shape[1], layer.hidden_size)


def continued(layer: Any, start: Any) -> Any:
    """What a layer gives for what was begun, and its last states."""
    if type(start) is not tuple:
        return type(layer).forward(layer, start)
    x, zeros = start
    kind, own = plain_type(layer), layer._parameters
    with by_blas() if IS_ARM and _is_quicker(layer, kind, x) else nullcontext():
        outputs, *last = _FUNCTIONS[kind](
            x, [zeros, zeros] if kind is nn.LSTM else zeros, [own[name] for name in layer._flat_weights_names],
            layer.bias, layer.num_layers, 0.0, False, layer.bidirectional, False,
        )  # fmt: skip
    return outputs.transpose(0, 1) if layer.batch_first else outputs, tuple(last) if kind is nn.LSTM else last[0]


def _is_quicker(layer: Any, kind: type[nn.Module], x: Tensor) -> bool:
    """Whether a layer takes less time by BLAS."""
    return x.dtype == torch.float32 and (kind is nn.GRU or x.shape[1] * 4 * layer.hidden_size**2 >= MANY)
