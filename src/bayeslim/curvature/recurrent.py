"""Recurrent layers unrolled over time, so that hooks see the products that their weights are in.

`nn.LSTM`, `nn.GRU` and `nn.RNN` run all time steps in one fused call. On a replica they are retyped to compute the same
step by step, with two linear layers: one multiplies the inputs of all steps, the other the hidden state of each step.

    LSTM    i, f, g, o = W_ih x_t + W_hh h + b             c_t = σ(f) c + σ(i) tanh(g)       h_t = σ(o) tanh(c_t)
    GRU     r, z from two thirds of the rows likewise      n = tanh(W_in x_t + r ⊙ W_hn h)   h_t = (1 − z) n + z h

Each linear layer then has Kronecker factors over its time steps (Martens, Ba & Johnson 2018, "Kronecker-factored
curvature approximations for recurrent neural networks", with time steps taken as independent), and gradients of single
examples without a pass through the whole network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

State = tuple[Tensor, ...]
"""The hidden state of every example, (B, H); an LSTM's has the cell state too."""


def unroll_(model: nn.Module) -> nn.Module:
    """Retype the recurrent layers of a replica in place, and return it.

    A layer with a forward of its own (a subclass, or one set on the instance) is left alone.
    """
    for module in list(model.modules()):
        kind = UNROLLED.get(type(module))
        if kind is not None and "forward" not in vars(module):
            parts = _linear_layers(module)
            vars(module)["_modules"] = {**module._modules, **parts}
            module.__class__ = kind
    return model


def is_unrolled(module: nn.Module) -> bool:
    """Tell whether a module is a recurrent layer that was unrolled."""
    return isinstance(module, (_Sequence, _Cell))


def _linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Make a linear layer of each weight and its bias: "ih_l0" of weight_ih_l0."""
    parts: dict[str, nn.Module] = {}
    for leaf, weight in module._parameters.items():
        if leaf.startswith("weight_") and weight is not None:
            name = leaf.removeprefix("weight_")
            part = nn.Linear(1, 1, bias=False, device="meta")
            part.out_features, part.in_features = weight.shape
            part.weight = weight
            part.register_parameter("bias", module._parameters.get(f"bias_{name}"))
            parts[name] = part.eval()
    return parts


class _Step:
    """One time step, from the products with inputs and hidden states."""

    def step(self, x: Tensor, state: State, suffix: str) -> State:
        """Compute the next state from W_ih x_t + b_ih, (B, gates · H), and the last state."""
        raise NotImplementedError

    def part(self, name: str) -> nn.Module:
        """Look up a linear layer by name."""
        modules: dict[str, Any] = self._modules  # type: ignore[attr-defined]
        found: nn.Module = modules[name]
        return found


class _LSTMStep(_Step):
    def step(self, x: Tensor, state: State, suffix: str) -> State:
        h, c = state
        i, f, g, o = (x + self.part(f"hh{suffix}")(h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (self.part(f"hr{suffix}")(h) if getattr(self, "proj_size", 0) else h), c


class _GRUStep(_Step):
    def step(self, x: Tensor, state: State, suffix: str) -> State:
        (h,) = state
        r, z, n = x.chunk(3, -1)
        from_r, from_z, from_n = self.part(f"hh{suffix}")(h).chunk(3, -1)
        r, z = (r + from_r).sigmoid(), (z + from_z).sigmoid()
        n = (n + r * from_n).tanh()
        return ((1 - z) * n + z * h,)


class _RNNStep(_Step):
    nonlinearity: str

    def step(self, x: Tensor, state: State, suffix: str) -> State:
        total = x + self.part(f"hh{suffix}")(state[0])
        return (total.tanh() if self.nonlinearity == "tanh" else total.relu(),)


class _Cell(_Step):
    """A single step: `nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`."""

    states: ClassVar[int] = 1
    hidden_size: int

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        x = input if input.ndim > 1 else input.unsqueeze(0)
        if hx is None:
            state: State = tuple(x.new_zeros(len(x), self.hidden_size) for _ in range(self.states))
        else:
            given = hx if isinstance(hx, tuple) else (hx,)
            state = tuple(h if h.ndim > 1 else h.unsqueeze(0) for h in given)
        after = self.step(self.part("ih")(x), state, "")
        after = after if input.ndim > 1 else tuple(h.squeeze(0) for h in after)
        return after if self.states > 1 else after[0]


class _Sequence(_Step):
    """All steps: `nn.LSTM`, `nn.GRU`, `nn.RNN`."""

    states: ClassVar[int] = 1
    num_layers: int
    bidirectional: bool
    batch_first: bool
    hidden_size: int
    proj_size: int

    def forward(self, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            data, sizes, order, back = input
            outputs, last = self._run(data, sizes.tolist(), self._states(hx, data, int(sizes[0]), order))
            last = last if back is None else tuple(h.index_select(1, back) for h in last)
            return PackedSequence(outputs, sizes, order, back), self._hidden(last)
        batched = input.ndim == 3
        x = input if batched else input.unsqueeze(0 if self.batch_first else 1)
        x = x if self.batch_first else x.transpose(0, 1)
        if hx is not None and not batched:
            hx = tuple(h.unsqueeze(1) for h in hx) if isinstance(hx, tuple) else hx.unsqueeze(1)
        outputs, last = self._run(x, None, self._states(hx, x, len(x), None))
        outputs = outputs if self.batch_first else outputs.transpose(0, 1)
        if not batched:
            outputs = outputs.squeeze(0 if self.batch_first else 1)
            last = tuple(h.squeeze(1) for h in last)
        return outputs, self._hidden(last)

    def _run(self, x: Tensor, sizes: Sequence[int] | None, states: State) -> tuple[Tensor, State]:
        """Run all layers and directions on (B, T, I), or on packed rows with batch sizes."""
        last: list[State] = []
        directions = ("", "_reverse") if self.bidirectional else ("",)
        for layer in range(self.num_layers):
            sides = []
            for reverse in directions:
                suffix = f"_l{layer}{reverse}"
                products = self.part(f"ih{suffix}")(x)
                steps = products.unbind(1) if sizes is None else products.split(list(sizes))
                state = tuple(h[len(last)] for h in states)
                outputs: list[Tensor] = []
                for step in reversed(steps) if reverse else steps:
                    count = len(step)  # a packed sequence has its longest examples first
                    after = self.step(step, tuple(h[:count] for h in state), suffix)
                    outputs.append(after[0])
                    if count < len(state[0]):
                        after = tuple(torch.cat([a, h[count:]]) for a, h in zip(after, state, strict=True))
                    state = after
                outputs = outputs[::-1] if reverse else outputs
                sides.append(torch.stack(outputs, 1) if sizes is None else torch.cat(outputs))
                last.append(state)
            x = sides[0] if len(sides) == 1 else torch.cat(sides, -1)
        return x, tuple(torch.stack(each) for each in zip(*last, strict=True))

    def _states(self, hx: Any, like: Tensor, examples: int, order: Tensor | None) -> State:
        """Make the initial states, each (layers · directions, B, H), of zeros or as given."""
        if hx is not None:
            given = hx if isinstance(hx, tuple) else (hx,)
            return given if order is None else tuple(h.index_select(1, order) for h in given)
        count = self.num_layers * (2 if self.bidirectional else 1)
        widths = (self.proj_size or self.hidden_size, self.hidden_size)[: self.states]
        return tuple(like.new_zeros(count, examples, width) for width in widths)

    def _hidden(self, last: State) -> Any:
        return last if self.states > 1 else last[0]


class UnrolledLSTM(_Sequence, _LSTMStep, nn.LSTM):
    """An `nn.LSTM` step by step."""

    states = 2


class UnrolledGRU(_Sequence, _GRUStep, nn.GRU):
    """An `nn.GRU` step by step."""


class UnrolledRNN(_Sequence, _RNNStep, nn.RNN):
    """An `nn.RNN` step by step."""


class UnrolledLSTMCell(_Cell, _LSTMStep, nn.LSTMCell):
    """An `nn.LSTMCell` with its products in linear layers."""

    states = 2


class UnrolledGRUCell(_Cell, _GRUStep, nn.GRUCell):
    """An `nn.GRUCell` with its products in linear layers."""


class UnrolledRNNCell(_Cell, _RNNStep, nn.RNNCell):
    """An `nn.RNNCell` with its products in linear layers."""


UNROLLED: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: UnrolledLSTM,
    nn.GRU: UnrolledGRU,
    nn.RNN: UnrolledRNN,
    nn.LSTMCell: UnrolledLSTMCell,
    nn.GRUCell: UnrolledGRUCell,
    nn.RNNCell: UnrolledRNNCell,
}
"""The unrolled class of each recurrent layer, by exact type."""
