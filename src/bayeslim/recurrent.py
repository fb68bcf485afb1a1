"""Recurrent layers in evaluation mode, without what their modules do around them.

Of an LSTM on an ARM CPU oneDNN takes up to three times as long as its steps one after the other do, of which each is
one product by BLAS and functions of it:

    i, f, g, o = W x + U h + b,    c' = σ(f) c + σ(i) tanh(g),    h' = σ(o) tanh(c').

S. Hochreiter, J. Schmidhuber, "Long short-term memory", 1997.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.blas import IS_ARM, by_blas
from bayeslim.stochastic import plain_type

MANY = 2**19
"""Of how many multiplications a step's calls take less time than what they compute."""

_FUNCTIONS: dict[type[nn.Module], Any] = {nn.LSTM: torch.lstm, nn.GRU: torch.gru}


def is_known(layer: Any) -> bool:
    """Whether `called` does what a layer does."""
    if plain_type(layer) not in _FUNCTIONS or layer.proj_size or layer.training:
        return False
    return bool(layer._parameters.keys() == set(layer._flat_weights_names))


def called(layer: Any, x: Any, states: Any = None) -> Any:
    """What a layer gives for a sequence, and its last states."""
    if states is not None or not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != layer.input_size:
        return type(layer).forward(layer, x, states)
    weights = [layer._parameters[name] for name in layer._flat_weights_names]
    kind, size = plain_type(layer), layer.hidden_size
    examples = x.shape[0] if layer.batch_first else x.shape[1]
    if kind is nn.LSTM and examples * 4 * size**2 >= MANY and _is_slow(x, *weights):
        return _in_steps(layer, x, weights)
    zeros = x.new_zeros(layer.num_layers * (2 if layer.bidirectional else 1), examples, size)
    outputs, *last = _FUNCTIONS[kind](
        x, [zeros, zeros] if kind is nn.LSTM else zeros, weights, layer.bias, layer.num_layers, 0.0, False,
        layer.bidirectional, layer.batch_first,
    )  # fmt: skip
    return outputs, tuple(last) if kind is nn.LSTM else last[0]


def _is_slow(*tensors: Tensor) -> bool:
    return IS_ARM and all(tensor.is_cpu and tensor.dtype == torch.float32 for tensor in tensors)


def _in_steps(layer: Any, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x = x.transpose(0, 1) if layer.batch_first else x
    each = 4 if layer.bias else 2
    directions = (False, True) if layer.bidirectional else (False,)
    last: list[tuple[Tensor, Tensor]] = []
    with by_blas():
        for _ in range(layer.num_layers):
            values = []
            for backwards in directions:
                outputs, state = _one_way(x.flip(0) if backwards else x, *weights[:each])
                values.append(outputs.flip(0) if backwards else outputs)
                last.append(state)
                weights = weights[each:]
            x = values[0] if len(values) == 1 else torch.cat(values, -1)
    hidden, cells = (torch.stack(states) for states in zip(*last, strict=True))
    return x.transpose(0, 1) if layer.batch_first else x, (hidden, cells)


def _one_way(x: Tensor, ahead: Tensor, back: Tensor, *biases: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One layer's hidden states, (T, B, H), of a sequence, (T, B, features); and the last ones."""
    sums = x.flatten(0, 1) @ ahead.mT
    for bias in biases:
        sums += bias
    hidden = cells = x.new_zeros(x.shape[1], back.shape[1])
    states = []
    for step in sums.view(*x.shape[:2], -1):
        i, f, g, o = step.addmm_(hidden, back.mT).chunk(4, -1)
        cells = torch.sigmoid(f).mul_(cells).addcmul_(i.sigmoid_(), g.tanh_())
        hidden = torch.tanh(cells).mul_(o.sigmoid_())
        states.append(hidden)
    return torch.stack(states), (hidden, cells)
