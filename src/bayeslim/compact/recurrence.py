"""Recurrent layers as single operations while `torch.export` traces.

torch unrolls an LSTM, GRU or RNN over its time steps to find the shape of its result. That is slow, and it makes a
constant of the number of steps. While a network is traced, its recurrent layers are calls of operations with a shape
rule of their own; afterwards the graph gets torch's own operations back.

The same is done for packed sequences. Their number of elements and of time steps depends on the lengths, which are
data, so both are sizes that torch leaves open. Their number of rows is the batch size: a recurrent layer asks for it as
the first of the batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
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


def _packed_shapes(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return a packed sequence of any lengths up to that of the padded one."""
    context = torch.library.get_ctx()
    rows, steps = padded.shape[:2] if batch_first else (padded.shape[1], padded.shape[0])
    elements, longest = context.new_dynamic_size(min=1), context.new_dynamic_size(min=1)
    torch._check(longest <= steps)
    torch._check(elements <= rows * steps)
    return padded.new_empty([elements, *padded.shape[2:]]), lengths.new_empty([longest])


def _padded_again_shapes(
    data: Tensor, sizes: Tensor, rows: int, batch_first: bool, value: float, steps: int
) -> tuple[Tensor, Tensor]:
    lead = [rows, steps] if batch_first else [steps, rows]
    return data.new_empty([*lead, *data.shape[1:]]), sizes.new_empty([rows])


def _padded_again(
    data: Tensor, sizes: Tensor, rows: int, batch_first: bool, value: float, steps: int
) -> tuple[Tensor, Tensor]:
    return torch._VF._pad_packed_sequence(data, sizes, batch_first, value, steps)


def _register_packing() -> None:
    results = "(Tensor, Tensor)"
    _LIBRARY.define(f"pack(Tensor input, Tensor lengths, bool batch_first) -> {results}")
    _LIBRARY.define(
        "pad(Tensor data, Tensor batch_sizes, SymInt rows, bool batch_first, Scalar padding_value, "
        f"SymInt total_length) -> {results}"
    )
    packed: Callable[..., Any] = torch.ops.aten._pack_padded_sequence.default
    _LIBRARY.impl("pack", lambda *args: packed(*args), "CompositeExplicitAutograd")
    _LIBRARY.impl("pad", _padded_again, "CompositeExplicitAutograd")
    torch.library.register_fake("bayeslim::pack", _packed_shapes, lib=_LIBRARY)
    torch.library.register_fake("bayeslim::pad", _padded_again_shapes, lib=_LIBRARY)


for _cell in _CELLS:
    _register(_cell)
_register_packing()

_FUNCTIONS = {getattr(torch, cell): cell for cell in _CELLS}
RECURRENT = {getattr(torch.ops.bayeslim, cell).default: getattr(torch.ops.aten, cell).input for cell in _CELLS} | {
    getattr(torch.ops.bayeslim, f"packed_{cell}").default: getattr(torch.ops.aten, cell).data for cell in _CELLS
}
"""Torch's own operation for each operation that stands for it in a trace."""


class WholeRecurrentLayers(TorchFunctionMode):
    """A mode in which recurrent layers and packing call the operations of this module."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[int, tuple[Tensor, Any]] = {}  # the batch size, by the identity of the batch sizes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operation that stands for a recurrent layer, or for packing."""
        if func is torch._VF._pack_padded_sequence:
            packed, sizes = torch.ops.bayeslim.pack(*args)
            self._rows[id(sizes)] = sizes, args[0].shape[0 if args[2] else 1]
            return packed, sizes
        if func is torch._VF._pad_packed_sequence and id(args[1]) in self._rows:
            return torch.ops.bayeslim.pad(*args[:2], self._rows[id(args[1])][1], *args[2:])
        if func is Tensor.__getitem__ and id(args[0]) in self._rows and args[1] == 0:
            return self._rows[id(args[0])][1]
        if func is torch.empty_like:  # inverts the order of packed rows; stored graphs have no uninitialised memory
            func = torch.zeros_like
        cell = _FUNCTIONS.get(func) if getattr(func, "__name__", "") in _CELLS else None
        if cell is None or kwargs:
            return func(*args, **(kwargs or {}))
        is_packed = isinstance(args[3], (tuple, list))
        return getattr(torch.ops.bayeslim, f"packed_{cell}" if is_packed else cell)(*args)


@contextmanager
def unchecked_states(network: nn.Module) -> Iterator[None]:
    """Leave out the check of states in recurrent layers.

    It fixes the batch size of packed sequences.
    """
    layers = [module for module in network.modules() if isinstance(module, nn.RNNBase)]
    for layer in layers:
        layer.__dict__["check_forward_args"] = lambda *args: None
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["check_forward_args"]


def restore_recurrent_(graph: fx.Graph) -> None:
    """Put torch's own operations back into a traced graph, in place."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in RECURRENT:
            node.target = RECURRENT[node.target]
        elif node.target is torch.ops.bayeslim.pack.default:
            node.target = torch.ops.aten._pack_padded_sequence.default
        elif node.target is torch.ops.bayeslim.pad.default:
            node.target = torch.ops.aten._pad_packed_sequence.default
            node.args = (*node.args[:2], *node.args[3:])
