"""Which units matter: those whose value depends on the input and that something which matters reads.

One walk with the real weights marks, beside every tensor, the elements that *depend on the network's input*: movements are run on the
marks, a product depends on its input wherever the weights are non-zero. What does not depend on the input is a constant, and
its value is simply the one found in the walk, whatever activation or norm it went through.

A connection is *idle* if its weight is zero, or if it reads a constant that is zero or can be folded into the bias: the same everywhere,
and not through a zero-padded convolution, where the border sees less of it. A unit is needed if some needed unit (in the end, an output)
reads it through a connection that is not idle; this least fixed point removes also what only feeds itself around a residual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from bayeslim.compact.identity import Contraction, Identities, Product
from bayeslim.compact.labels import settle, slim
from bayeslim.compact.ops import INDEXING, MOVEMENT, Call, after_mixing, is_pointwise, mixed_dims, move, read_call
from bayeslim.compact.trace import Walker

_BILINEAR = frozenset("linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d matmul mm bmm".split())


class Liveness(Walker):
    """The walk that finds constants, then which classes of labels are needed.

    Args:
        identity: who is who.
        tensors: the values of parameters and buffers, by the names of the graph.
    """

    def __init__(self, identity: Identities, tensors: Mapping[str, Tensor]):
        super().__init__(identity.trace, tensors)
        self.identity = identity
        self.varies: dict[fx.Node, Any] = {}
        self.constant: dict[int, Tensor] = {}
        self._idle: dict[int, Tensor] = {}
        self._contractions = _by_node(identity.contractions)
        self._products = _by_node(identity.products)
        self._weights = Counter(contraction.weight for contraction in identity.contractions)
        self._biases = Counter(contraction.bias for contraction in identity.contractions)
        self._active_products: list[Tensor] = []
        self.walk()

    def needed(self, seeds: Tensor) -> Tensor:
        """Which labels' classes are needed, given those that are needed anyway; both masks over all labels, by representative."""
        find = self.identity.labels.find
        need = seeds.clone()
        for labels in self._active_products:
            need[find(labels)] = True
        edges = [
            (find(c.inputs), find(c.outputs), ~self._idle[place]) for place, c in enumerate(self.identity.contractions)
        ]  # fmt: skip
        count = -1
        while count != (count := int(need.sum())):
            for inputs, outputs, live in reversed(edges):
                active = live & need[slim(outputs)]
                if slim(inputs).shape[0] == 1:
                    need[inputs[0][active.any(0)]] = True
                else:
                    need[inputs[active]] = True
        return need

    def folded(self, contraction: int, gone: Tensor) -> Tensor:
        """What the bias of a contraction gains from the constants among the inputs that go, by output channel.

        Args:
            contraction: its place in the list of contractions.
            gone: mask over all labels, by representative.
        """
        c = self.identity.contractions[contraction]
        weight = _matrix(self.tensors[c.weight].double(), c)
        value = self.constant[contraction].double()[c.channel] * gone[self.identity.labels.find(c.inputs)]
        return (weight * value).sum(1)

    def visit(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Mark what depends on the input."""
        if node.op == "placeholder" and isinstance(result, Tensor):
            self.varies[node] = torch.tensor(True).expand(result.shape)
        elif node.op == "get_attr":
            self.varies[node] = torch.tensor(False).expand(result.shape)
        elif node.op == "call_function" and (isinstance(result, (Tensor, tuple, list))):
            call = read_call(node, args, kwargs, result)
            marks = self._marks(call)
            self.varies[node] = [settle(part) for part in marks] if isinstance(marks, (tuple, list)) else settle(marks)
            for place, contraction in self._contractions.get(node, []):
                self._inspect(place, contraction)
            for _, product in self._products.get(node, []):
                self._active_products.append(product.labels[~self._zero_product(product)])

    # constants

    def _marks(self, call: Call) -> Any:
        marks = {node: self.varies[node] for node in call.operands if node in self.varies}
        tensors = list(call.result) if isinstance(call.result, (tuple, list)) else [call.result]
        if call.name == "getitem":
            return self.varies[call.nodes[0]][call.nodes[1]]  # type: ignore[index]
        if not any(bool(part.any()) for mark in marks.values() for part in (mark if isinstance(mark, list) else [mark])):
            random = torch.Tag.nondeterministic_seeded in getattr(call.node.target, "tags", ())
            return _each(call.result, [torch.tensor(random).expand(part.shape) for part in tensors])
        if call.name in MOVEMENT:
            return move(call.node, lambda node: marks[node] if node in marks else self.env[node])
        if call.name in INDEXING and not any(bool(marks[node].any()) for node in call.operands[1:]):
            return move(call.node, lambda node: marks[node] if node is call.operands[0] else self.env[node])
        special = getattr(self, f"_marks_{call.name.lstrip('_')}", None)
        if special is not None:
            return special(call)
        if call.name in _BILINEAR:
            return self._bilinear(call, *call.node.args[:2])
        if is_pointwise(call):
            return self._any(list(marks), call.result.shape)
        dims = mixed_dims(call)
        if dims is not None and len(marks) == 1:
            mark = marks[call.operands[0]]
            for dim in dims:
                mark = mark.any(dim, keepdim=True).expand(mark.shape)
            return _each(call.result, [after_mixing(mark, dims, part.shape) for part in tensors])
        return _each(call.result, [torch.tensor(True).expand(part.shape) for part in tensors])

    def _any(self, nodes: list[Any], shape: torch.Size) -> Tensor:
        result = torch.tensor(False)
        for node in nodes:
            result = result | slim(self.varies[node])
        return result.expand(shape)

    def _live(self, node: Any) -> Tensor:
        """Where a tensor varies or is a constant other than zero."""
        return self.varies[node] | (self.env[node] != 0)

    def _bilinear(self, call: Call, left: Any, right: Any) -> Tensor:
        """A sum of products varies unless every product is zero or of two constants."""
        target: Any = call.node.target
        rest = [None if isinstance(arg, fx.Node) else arg for arg in call.node.args[2:]]
        a, b = self._live(left).float(), self._live(right).float()
        still_a, still_b = (self._live(node) & ~self.varies[node] for node in (left, right))
        return target(a, b, *rest, **call.node.kwargs) - target(still_a.float(), still_b.float(), *rest, **call.node.kwargs) > 0.5  # type: ignore[no-any-return]

    def _marks_addmm(self, call: Call) -> Tensor:
        bias, left, right = call.node.args[:3]
        a, b = self._live(left).float(), self._live(right).float()
        still_a, still_b = (self._live(node) & ~self.varies[node] for node in (left, right))
        return (a @ b - still_a.float() @ still_b.float() > 0.5) | self.varies[bias]  # type: ignore[index, no-any-return]

    _marks_baddbmm = _marks_addmm

    def _marks_mul(self, call: Call) -> Tensor:
        nodes = [node for node in call.node.args if node in self.varies]
        result = self._any(nodes, call.result.shape)
        for node in nodes:
            result = result & self._live(node)
        return result

    def _marks_glu(self, call: Call) -> Tensor:
        node = call.nodes["self"]
        first, second = self.varies[node].chunk(2, call.values["dim"])
        return (first | second) & self._live(node).chunk(2, call.values["dim"])[0]  # type: ignore[no-any-return]

    def _marks_native_batch_norm_legit_no_training(self, call: Call) -> Any:
        mark = self._marks_batch_norm(call)
        return [mark] + [torch.tensor(True).expand(part.shape) for part in call.result[1:]]

    def _marks_batch_norm(self, call: Call) -> Tensor:
        mark: Tensor = self.varies[call.nodes["input"]]
        if call.nodes["weight"] is None:
            return mark
        scale = self._live(call.nodes["weight"])
        return mark & scale.view([-1 if dim == 1 else 1 for dim in range(mark.ndim)])

    def _marks_embedding(self, call: Call) -> Tensor:
        return self._live(call.nodes["weight"]).any(0).expand(call.result.shape)

    def _marks_scaled_dot_product_attention(self, call: Call) -> Tensor:
        live = self._live(call.nodes["value"]).any(-2, keepdim=True)
        if live.ndim > 2 and live.shape[-3] != call.result.shape[-3]:
            live = live.repeat_interleave(call.result.shape[-3] // live.shape[-3], -3)
        return live.expand(call.result.shape)

    def _marks_lstm(self, call: Call) -> Any:
        live = self._live_units(call)
        directions = call.result[0].shape[-1] // len(live)
        return [live.repeat(directions).expand(call.result[0].shape)] + [live.expand(part.shape) for part in call.result[1:]]

    _marks_gru = _marks_rnn_tanh = _marks_rnn_relu = _marks_lstm

    def _live_units(self, call: Call) -> Tensor:
        """Recurrent units with a non-zero weight, bias or initial state in any gate, layer or direction; the others stay at zero."""
        units = call.values["params"][1].shape[1]
        live = torch.zeros(units, dtype=torch.bool)
        for value in call.values["params"]:
            live |= (value != 0).reshape(-1, units, value.shape[1] if value.ndim > 1 else 1).any(-1).any(0)
        states = call.nodes["hx"]
        for state in states if isinstance(states, (tuple, list)) else [states]:
            live |= self._live(state).reshape(-1, units).any(0)
        for place, contraction in self._contractions.get(call.node, []):
            if contraction.source is None:
                self.constant[place] = torch.zeros(contraction.channel.shape[1])
                idle = ~live.repeat(contraction.channel.shape[1] // units)
                self._idle[place] = idle | (_matrix(self.tensors[contraction.weight] != 0, contraction) == 0)
        return live

    # connections

    def _inspect(self, place: int, contraction: Contraction) -> None:
        """Find the constants that a contraction reads, and which of its connections are idle."""
        silent = ~_matrix(self.tensors[contraction.weight] != 0, contraction)
        if contraction.source is None:
            self._idle.setdefault(place, silent)
            return
        value, still = self._constants(contraction.source, contraction.dim)
        single = self._weights[contraction.weight] == 1 and self._biases[contraction.bias] == 1
        idle = still & ((value == 0) | (contraction.bias is not None and single))
        self.constant[place] = torch.where(still, value, 0.0)
        self._idle[place] = silent | idle[contraction.channel]

    def _constants(self, node: fx.Node, dim: int) -> tuple[Tensor, Tensor]:
        """The value of each channel of a tensor, and where it is one and the same for all inputs and positions."""
        value = self.env[node].movedim(dim, 0).flatten(1)
        mark = self.varies[node].movedim(dim, 0).reshape(len(value), -1)
        still = ~mark.any(1) & (value == value[:, :1]).all(1)
        return value[:, 0], still

    def _zero_product(self, product: Product) -> Tensor:
        zero = torch.zeros(len(product.labels), dtype=torch.bool)
        for node, dim in zip(product.sources, product.dims, strict=True):
            zero |= ~self._live(node).movedim(dim, 0).flatten(1).any(1)
        return zero


def _matrix(weight: Tensor, contraction: Contraction) -> Tensor:
    """A weight summed over its kernel, as (produces, reads)."""
    matrix = weight.movedim((contraction.produces, contraction.reads), (0, 1)).flatten(2) if weight.ndim > 2 else None
    if matrix is not None:
        return matrix.any(2) if weight.dtype == torch.bool else matrix.sum(2)
    return weight if contraction.produces == 0 else weight.t()


def _by_node(items: list[Any]) -> dict[fx.Node, list[tuple[int, Any]]]:
    result: dict[fx.Node, list[tuple[int, Any]]] = {}
    for place, item in enumerate(items):
        result.setdefault(item.node, []).append((place, item))
    return result


def _each(result: Any, marks: list[Tensor]) -> Any:
    return marks if isinstance(result, (tuple, list)) else marks[0]
