"""Dependence: which elements of tensors depend on the network's input.

One walk with the real weights marks, beside every tensor, the elements that depend on the input. Movements are run on
the marks themselves; a sum of products depends on the input if some product does, that is, if one factor does and the
other is not zero. An element that does not depend on the input is a constant. Its value is the one found in the walk,
after all activations and norms on the way. Every result of an unknown operation counts as dependent.

A constant must be the same for inputs of all sizes. The symbolic shapes of the trace say which dimensions change with
the sizes of the inputs. Along such a dimension a constant must have one value at all positions. A sum over it, a padded
convolution over it, or a number that is computed from sizes, makes the result depend on the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from bayeslim.compact.labels import settle, slim
from bayeslim.compact.ops import (
    ALONG_DIM,
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

_SIZE_FREE = words("mean nanmean amax amin max min median any all var std var_mean std_mean")
"""Reductions of equal values whose result does not depend on their number."""
_ZERO_AT_ZERO = words("sum nansum cumsum norm linalg_vector_norm count_nonzero")
"""Reductions that are zero for any number of zeros."""
_PICKING = words("slice select narrow narrow_copy split unsafe_split chunk unsafe_chunk tensor_split")
"""Movements whose numbers choose positions; the numbers of other movements are sizes."""
_PRODUCTS = {
    **dict.fromkeys(words("linear matmul mm bmm conv1d conv2d conv3d"), 0),
    **dict.fromkeys(words("conv_transpose1d conv_transpose2d conv_transpose3d"), 0),
    **dict.fromkeys(words("addmm baddbmm"), 1),
}
"""Sums of products, and the argument that is the first factor."""
_SIZED = MOVEMENT | CREATION | {"_pad_packed_sequence"}
"""Operations whose numbers are sizes of the result."""
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
            marks = self._with_sizes(call, self._marks(call))
            self.varies[node] = [settle(part) for part in marks] if isinstance(marks, (tuple, list)) else settle(marks)
            self.marked(call)

    def _with_sizes(self, call: Call, marks: Any) -> Any:
        """Mark also what depends on the sizes of the inputs."""
        if call.name == "getitem" or all(bool(slim(mark).all()) for mark in _many(marks)):
            return marks
        shapes = _many(call.node.meta.get("val"))
        values = _many(call.result)
        parts = [self._changing(call, mark, value) for mark, value in zip(_many(marks), values, strict=True)]
        for place, (mark, value) in enumerate(zip(parts, values, strict=True)):
            for dim in self._dynamic_dims(shapes[place]):
                differs = torch.logical_or(mark, value != value.narrow(dim, 0, 1))
                mark = differs.any(dim, keepdim=True).expand(mark.shape)
            parts[place] = mark
        return parts if isinstance(marks, (tuple, list)) else parts[0]

    def _changing(self, call: Call, mark: Tensor, value: Tensor) -> Tensor:
        """Mark the elements of a result that an operation computes from sizes."""
        if any(_is_symbolic(node) for node in call.operands):
            mark = self._computed_from_sizes(call, mark, value)
        reduced = mixed_dims(call) if call.name in ALONG_DIM else None
        first = next((node for node in call.operands if node in self.varies), None)
        over = set(self._dynamic_dims(first.meta.get("val"))) if first is not None else set()
        if reduced is not None and over & set(reduced) and call.name not in _SIZE_FREE:
            return torch.logical_or(mark, value != 0) if call.name in _ZERO_AT_ZERO else _filled(True, value)
        if call.name in _PRODUCTS and (_has_borders(call, over) or self._sums_over_sizes(call)):
            return torch.logical_or(mark, self._of_constants(call))
        if call.name.startswith("avg_pool") and _has_borders(call, over):
            return torch.logical_or(mark, value != 0)
        return mark

    def _computed_from_sizes(self, call: Call, mark: Tensor, value: Tensor) -> Tensor:
        """Mark the elements that numbers computed from sizes or from data may change."""
        if call.name in _PICKING:
            source, dim = self.env[call.operands[0]], call.values.get("dim", 0)
            differs = (source != source.narrow(dim, 0, 1)).any(dim, keepdim=call.name != "select")
            return torch.logical_or(mark, differs)
        if call.name in ("mul", "div"):
            return torch.logical_or(mark, value != 0)
        is_size = call.name in _SIZED and not _is_symbolic(call.nodes.get("fill_value"))
        return mark if is_size else _filled(True, value)

    def _dynamic_dims(self, value: Any) -> list[int]:
        """List the dimensions whose sizes change with those of the inputs."""
        if not isinstance(value, Tensor):
            return []
        sizes: list[Any] = list(value.shape)
        return [dim for dim, size in enumerate(sizes) if not isinstance(size, int) and not self._is_fixed(size)]

    def _is_fixed(self, size: torch.SymInt) -> bool:
        """Return whether a guard fixes a computed size, such as h · w."""
        expression, known = size.node.expr, self.trace.fixed_sizes
        return bool(known) and expression.expand() in known

    def _sums_over_sizes(self, call: Call) -> bool:
        """Return whether a product of matrices sums over a dimension whose size changes."""
        if call.name.startswith("conv"):
            return False
        left: Any = call.node.args[_PRODUCTS[call.name]]
        value = left.meta["val"]
        return value.ndim - 1 in self._dynamic_dims(value)

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
        if call.name in _PRODUCTS:
            return self._bilinear(call)
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

    def _bilinear(self, call: Call) -> Tensor:
        """Mark the sums of products in which some product depends on the input."""
        left, right, product = self._factors(call)
        counts = product(self.live(left).float(), self.live(right).float())
        return torch.logical_and(counts > 0.5, counts - self._counts_of_constants(call) > 0.5)

    def _of_constants(self, call: Call) -> Tensor:
        """Mark the sums of products in which some product of two constants is not zero."""
        return self._counts_of_constants(call) > 0.5

    def _counts_of_constants(self, call: Call) -> Tensor:
        left, right, product = self._factors(call)
        still = [self.live(node) & ~self.varies[node] for node in (left, right)]
        counts: Tensor = product(*(part.float() for part in still))
        return counts

    def _factors(self, call: Call) -> tuple[Any, Any, Any]:
        """Return the factors of a product, and the function that multiplies them."""
        start, target = _PRODUCTS[call.name], call.node.target
        left, right, *rest = call.node.args[start:]
        if start:
            return left, right, torch.matmul
        options = [None if isinstance(arg, fx.Node) else arg for arg in rest]
        kwargs = {key: None if isinstance(arg, fx.Node) else arg for key, arg in call.node.kwargs.items()}
        return left, right, lambda a, b: target(a, b, *options, **kwargs)  # type: ignore[operator]

    def _marks_addmm(self, call: Call) -> Tensor:
        bias: Any = call.node.args[0]
        return torch.logical_or(self._bilinear(call), self.varies[bias])

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

    def _marks_index_select(self, call: Call) -> Tensor:
        """Mark the positions that are not equal along a dimension that data pick from."""
        value, dim = self.env[call.nodes["self"]], call.values["dim"]
        differs = torch.logical_or(self.varies[call.nodes["self"]], value != value.narrow(dim, 0, 1))
        return differs.any(dim, keepdim=True).expand(call.result.shape)

    def _marks_pack_padded_sequence(self, call: Call) -> list[Tensor]:
        sequence, counts = call.result
        mark = self.varies[call.nodes["input"]]
        return [mark.reshape(-1, mark.shape[-1]).any(0).expand(sequence.shape), _filled(True, counts)]

    def _marks_pad_packed_sequence(self, call: Call) -> list[Tensor]:
        sequence, counts = call.result
        mark = self.varies[call.nodes["data"]]
        # Whether there is padding, and where, depends on the lengths.
        differs = self.env[call.nodes["data"]] != call.values["padding_value"]
        found = torch.logical_or(mark, differs).reshape(-1, mark.shape[-1]).any(0)
        return [found.expand(sequence.shape), _filled(True, counts)]

    def _marks_lstm(self, call: Call) -> list[Tensor]:
        if is_projected(call):
            return [_filled(True, part) for part in call.result]
        live = self.live_units(call)
        directions = call.result[0].shape[-1] // len(live)
        return [
            live.repeat(directions).expand(call.result[0].shape),
            *(live.expand(part.shape) for part in call.result[1:]),
        ]

    _marks_gru = _marks_rnn_tanh = _marks_rnn_relu = _marks_lstm


def is_projected(call: Call) -> bool:
    """Return whether a recurrent layer projects its hidden state."""
    directions = 2 if call.values["bidirectional"] else 1
    return len(call.values["params"]) // (call.values["num_layers"] * directions) in (3, 5)


def _is_symbolic(node: Any) -> bool:
    """Return whether a node is a number from sizes, from data or from an argument."""
    if not isinstance(node, fx.Node):
        return False
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _has_borders(call: Call, dynamic: set[int]) -> bool:
    """Return whether the border of a dynamic dimension reads fewer elements."""
    if not dynamic - {0}:
        return False
    if call.name.startswith("conv_transpose"):
        return True
    padding = call.values.get("padding", 0)
    padded = padding == "same" or any(_many(list(padding) if isinstance(padding, (tuple, list)) else padding))
    if call.name.startswith("conv"):
        return bool(padded)
    return call.name.startswith("avg_pool") and bool(padded or call.values.get("ceil_mode"))


def _filled(value: bool, like: Tensor) -> Tensor:
    return torch.tensor(value).expand(like.shape)


def _each(result: Any, marks: Any) -> Any:
    return [marks(part) for part in result] if isinstance(result, (tuple, list)) else marks(result)


def _many(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]
