"""Dependence: which elements of tensors depend on the network's input.

One walk with the real weights marks, beside every tensor, the elements that depend on the input. Movements are run on
the marks themselves; a sum of products depends on the input if some product does, that is, if one factor does and the
other is not zero. An element that does not depend on the input is a constant. Its value is the one found in the walk,
after all activations and norms on the way. Every result of an unknown operation counts as dependent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from bayeslim.compact.labels import settle, slim
from bayeslim.compact.ops import (
    CREATION,
    INDEXING,
    MOVEMENT,
    Call,
    after_mixing,
    is_pointwise,
    mixed_dims,
    move,
    read_call,
    words,
)
from bayeslim.compact.trace import Walker

_BILINEAR = words("linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d matmul mm bmm")
_CONSTANT = CREATION | words("zeros_like ones_like full_like empty_like")


class Dependence(Walker):
    """The walk that marks.

    Attributes:
        varies: for each node, where its result depends on the input; a list for nodes with several results.
    """

    varies: dict[fx.Node, Any]

    def visit(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Mark the result of a node."""
        if node.op == "placeholder" and isinstance(result, Tensor):
            self.varies[node] = _filled(True, result)
        elif node.op == "get_attr":
            self.varies[node] = _filled(False, result)
        elif node.op == "call_function" and isinstance(result, (Tensor, tuple, list)):
            call = read_call(node, args, kwargs, result)
            marks = self._marks(call)
            self.varies[node] = [settle(part) for part in marks] if isinstance(marks, (tuple, list)) else settle(marks)
            self.marked(call)

    def marked(self, call: Call) -> None:
        """Act on a marked operation while the values that it read are still in memory."""

    def live(self, node: Any) -> Tensor:
        """Mark where a tensor depends on the input or is a constant other than zero."""
        return torch.logical_or(self.varies[node], self.env[node] != 0)

    def live_units(self, call: Call) -> Tensor:
        """Mark recurrent units with a non-zero weight, bias or initial state."""
        units = call.values["params"][1].shape[1]
        live = torch.zeros(units, dtype=torch.bool)
        for value in call.values["params"]:
            live |= (value != 0).reshape(-1, units, value.shape[1] if value.ndim > 1 else 1).any(-1).any(0)
        states = call.nodes["hx"]
        for state in states if isinstance(states, (tuple, list)) else [states]:
            live |= self.live(state).reshape(-1, units).any(0)
        return live

    def _marks(self, call: Call) -> Any:
        if call.name == "getitem":
            nodes: dict[Any, Any] = call.nodes
            return self.varies[nodes[0]][nodes[1]]
        operands = [node for node in call.operands if node in self.varies]
        parts = [part for node in operands for part in _many(self.varies[node])]
        if call.name in _CONSTANT or not any(bool(part.any()) for part in parts):
            random = torch.Tag.nondeterministic_seeded in getattr(call.node.target, "tags", ())
            return _each(call.result, lambda part: _filled(random, part))
        if call.name in MOVEMENT:
            return move(call.node, lambda node: self.varies[node] if node in operands else self.env[node])
        if call.name in INDEXING and not any(bool(self.varies[node].any()) for node in operands[1:]):
            return move(call.node, lambda node: self.varies[node] if node is operands[0] else self.env[node])
        special = getattr(self, f"_marks_{call.name.lstrip('_')}", None)
        if special is not None:
            return special(call)
        if call.name in _BILINEAR:
            rest = [None if isinstance(arg, fx.Node) else arg for arg in call.node.args[2:]]
            target: Any = call.node.target
            left, right = call.node.args[:2]
            return self._bilinear(left, right, lambda a, b: target(a, b, *rest, **call.node.kwargs))
        if is_pointwise(call):
            return self._any(operands, call.result.shape)
        dims = mixed_dims(call)
        if dims is not None and len(operands) == 1:
            mark = self.varies[operands[0]]
            for dim in dims:
                mark = mark.any(dim, keepdim=True).expand(mark.shape)
            return _each(call.result, lambda part: after_mixing(mark, dims, part.shape))
        return _each(call.result, lambda part: _filled(True, part))

    def _any(self, nodes: list[fx.Node], shape: torch.Size) -> Tensor:
        result = torch.tensor(False)
        for node in nodes:
            result = torch.logical_or(result, slim(self.varies[node]))
        return result.expand(shape)

    def _bilinear(self, left: Any, right: Any, product: Any) -> Tensor:
        """Mark the sums of products in which some product depends on the input."""
        all_a, all_b = self.live(left), self.live(right)
        still_a, still_b = all_a & ~self.varies[left], all_b & ~self.varies[right]
        return torch.gt(product(all_a.float(), all_b.float()) - product(still_a.float(), still_b.float()), 0.5)

    def _marks_addmm(self, call: Call) -> Tensor:
        nodes: Any = call.node.args
        return torch.logical_or(self._bilinear(nodes[1], nodes[2], torch.matmul), self.varies[nodes[0]])

    _marks_baddbmm = _marks_addmm

    def _marks_mul(self, call: Call) -> Tensor:
        nodes = [node for node in call.operands if node in self.varies]
        result = self._any(nodes, call.result.shape)
        for node in nodes:
            result = torch.logical_and(result, self.live(node))
        return result

    def _marks_glu(self, call: Call) -> Tensor:
        node, dim = call.nodes["self"], call.values["dim"]
        value, gate = self.varies[node].chunk(2, dim)
        return torch.logical_and(value | gate, self.live(node).chunk(2, dim)[0])

    def _marks_batch_norm(self, call: Call) -> Tensor:
        mark: Tensor = self.varies[call.nodes["input"]]
        if call.nodes["weight"] is None:
            return mark
        scale = self.live(call.nodes["weight"])
        return mark & scale.view([-1 if dim == 1 else 1 for dim in range(mark.ndim)])

    def _marks_native_batch_norm_legit_no_training(self, call: Call) -> list[Tensor]:
        return [self._marks_batch_norm(call), *(_filled(True, part) for part in call.result[1:])]

    def _marks_instance_norm(self, call: Call) -> Tensor:
        mark = self._marks_batch_norm(call)
        return mark.flatten(2).any(2).view(*mark.shape[:2], *[1] * (mark.ndim - 2)).expand(mark.shape)

    def _marks_embedding(self, call: Call) -> Tensor:
        return self.live(call.nodes["weight"]).any(0).expand(call.result.shape)

    def _marks_scaled_dot_product_attention(self, call: Call) -> Tensor:
        live = self.live(call.nodes["value"]).any(-2, keepdim=True)
        if live.ndim > 2 and live.shape[-3] != call.result.shape[-3]:
            live = live.repeat_interleave(call.result.shape[-3] // live.shape[-3], -3)
        return live.expand(call.result.shape)

    def _marks_lstm(self, call: Call) -> list[Tensor]:
        live = self.live_units(call)
        if any(part.shape[-1] != len(live) for part in call.result[1:]):  # with projections
            return [_filled(True, part) for part in call.result]
        directions = call.result[0].shape[-1] // len(live)
        return [
            live.repeat(directions).expand(call.result[0].shape),
            *(live.expand(part.shape) for part in call.result[1:]),
        ]

    _marks_gru = _marks_rnn_tanh = _marks_rnn_relu = _marks_lstm


def _filled(value: bool, like: Tensor) -> Tensor:
    return torch.tensor(value).expand(like.shape)


def _each(result: Any, marks: Any) -> Any:
    return [marks(part) for part in result] if isinstance(result, (tuple, list)) else marks(result)


def _many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
