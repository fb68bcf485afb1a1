"""Recurrent layers as single operations while `torch.export` traces.

torch unrolls an LSTM, GRU or RNN over its time steps to find the shape of its result. That is slow, and it makes a
constant of the number of steps. While a network is traced, its recurrent layers are calls of operations with a shape
rule of their own; afterwards the graph gets torch's own operations back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

_CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_SETTINGS = "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional"
_LIBRARY = torch.library.Library("bayeslim", "DEF")


def _padded_shapes(state: Any, data: Tensor, bidirectional: bool) -> Any:
    states = state if isinstance(state, (tuple, list)) else [state]
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    return (data.new_empty([*data.shape[:-1], width]), *(torch.empty_like(part) for part in states))


def _register(cell: str) -> None:
    state, results = (
        ("Tensor[] hx", "(Tensor, Tensor, Tensor)") if cell == "lstm" else ("Tensor hx", "(Tensor, Tensor)")
    )
    function: Callable[..., Any] = getattr(torch, cell)
    _LIBRARY.define(f"{cell}(Tensor input, {state}, {_SETTINGS}, bool batch_first) -> {results}")
    _LIBRARY.define(f"packed_{cell}(Tensor data, Tensor batch_sizes, {state}, {_SETTINGS}) -> {results}")
    for name in (cell, f"packed_{cell}"):
        _LIBRARY.impl(name, lambda *args: function(*args), "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"bayeslim::{cell}", lambda data, hx, *rest: _padded_shapes(hx, data, rest[5]), lib=_LIBRARY
    )
    torch.library.register_fake(
        f"bayeslim::packed_{cell}", lambda data, sizes, hx, *rest: _padded_shapes(hx, data, rest[5]), lib=_LIBRARY
    )


for _cell in _CELLS:
    _register(_cell)

_FUNCTIONS = {getattr(torch, cell): cell for cell in _CELLS}
RECURRENT = {getattr(torch.ops.bayeslim, cell).default: getattr(torch.ops.aten, cell).input for cell in _CELLS} | {
    getattr(torch.ops.bayeslim, f"packed_{cell}").default: getattr(torch.ops.aten, cell).data for cell in _CELLS
}
"""Torch's own operation for each operation that stands for it in a trace."""


class WholeRecurrentLayers(TorchFunctionMode):
    """A mode in which recurrent layers call the operations of this module."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operation that stands for a recurrent layer."""
        cell = _FUNCTIONS.get(func) if getattr(func, "__name__", "") in _CELLS else None
        if cell is None or kwargs:
            return func(*args, **(kwargs or {}))
        packed = isinstance(args[3], (tuple, list))
        return getattr(torch.ops.bayeslim, f"packed_{cell}" if packed else cell)(*args)


def restore_recurrent_(graph: fx.Graph) -> None:
    """Put torch's own operations back into a traced graph, in place."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in RECURRENT:
            node.target = RECURRENT[node.target]
