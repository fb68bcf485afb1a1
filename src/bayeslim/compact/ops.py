"""Tensor operations, sorted by their effect on channels.

* *movement*: elements are only moved, copied or dropped, so the operation can be run on labels as it stands;
* *pointwise*: an element depends on the elements at its own index in the operands;
* *mixing*: elements depend on each other along some dimensions, and along the others nothing is mixed;
* *creation*: a tensor of equal elements, of a given size.

Contractions with weights (linear, convolution, attention, LSTM, ...) have rules of their own. All others are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


def words(text: str) -> frozenset[str]:
    """Split a text into a set of names."""
    return frozenset(text.split())


MOVEMENT = words(
    "view _unsafe_view reshape permute transpose t numpy_T mT T movedim swapaxes swapdims flatten unflatten "
    "squeeze unsqueeze expand broadcast_to repeat tile repeat_interleave cat concat concatenate stack hstack "
    "vstack chunk split unsafe_split split_with_sizes unsafe_split_with_sizes unsafe_chunk tensor_split unbind "
    "narrow slice select pixel_shuffle pixel_unshuffle roll flip rot90 unfold select_scatter slice_scatter "
    "diagonal view_as reshape_as expand_as narrow_copy"
)
INDEXING = words("index index_select gather take_along_dim")
COPIES = words("to _to_copy type_as contiguous alias detach clone lift_fresh_copy")
CREATION = words("zeros ones full empty new_zeros new_ones new_full new_empty")
_POINTWISE = words(
    "dropout feature_dropout alpha_dropout prelu _prelu_kernel hardswish log_sigmoid rsub masked_fill where to "
    "_to_copy type_as contiguous alias detach lift_fresh_copy zeros_like ones_like full_like empty_like tril triu "
    "copy"
)
_SPATIAL = ("max_pool", "avg_pool", "adaptive_", "upsample_", "lp_pool")
ALONG_DIM = words(
    "softmax _softmax _safe_softmax log_softmax _log_softmax cumsum cumprod cummax cummin sort argsort topk argmax "
    "argmin logsumexp sum mean prod amax amin max min var std var_mean std_mean any all norm linalg_vector_norm median "
    "nanmean nansum count_nonzero"
)


@dataclass(frozen=True)
class Call:
    """One node of the graph with its arguments by name, as nodes and as values."""

    node: fx.Node
    name: str
    nodes: dict[str, Any]
    values: dict[str, Any]
    result: Any

    @property
    def operands(self) -> list[fx.Node]:
        """The nodes of the tensor arguments, in order."""
        return list(self.node.all_input_nodes)


def read_call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Call:
    """Bind the arguments of an operation to their names in its schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        name = getattr(node.target, "__name__", str(node.target))
        return Call(node, name, dict(enumerate(node.args)), dict(enumerate(args)), result)  # type: ignore[arg-type]
    nodes: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for place, argument in enumerate(node.target._schema.arguments):
        key = argument.name
        if place < len(node.args):
            nodes[key], values[key] = node.args[place], args[place]
        elif key in node.kwargs:
            nodes[key], values[key] = node.kwargs[key], kwargs[key]
        else:
            nodes[key] = values[key] = argument.default_value if argument.has_default_value() else None
    return Call(node, node.target._schema.name.split("::")[-1].removesuffix("_"), nodes, values, result)


def is_pointwise(call: Call) -> bool:
    """Return whether an operation works element by element."""
    target = call.node.target
    return call.name in _POINTWISE or (isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags)


def mixed_dims(call: Call) -> list[int] | None:
    """List the dimensions that an operation mixes; None if it is unknown."""
    first = next((value for value in call.values.values() if isinstance(value, Tensor)), None)
    if first is None:
        return None
    rank = first.ndim
    if call.name.startswith(_SPATIAL) or call.name in ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"):
        digits = [int(char) for char in call.name if char in "123"]
        spatial = digits[0] if digits else rank - 2
        return list(range(rank - spatial, rank))
    if call.name in ("pad", "constant_pad_nd"):
        pad = call.values["pad"]
        return [rank - 1 - place // 2 for place in range(0, len(pad), 2) if pad[place] or pad[place + 1]]
    if call.name in ALONG_DIM:
        if "dim" not in call.values:
            return list(range(rank))
        dim = call.values["dim"]
        dims = list(range(rank)) if dim is None or dim == [] else ([dim] if isinstance(dim, int) else list(dim))
        return [d % rank if rank else 0 for d in dims]
    return None


def indexed_dims(call: Call) -> list[int]:
    """List the dimensions of the first operand that an indexing operation picks from."""
    if call.name == "index":
        dims: list[int] = []
        place = 0
        for index in call.values["indices"]:
            span = index.ndim if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
            if index is not None:
                dims += range(place, place + span)
            place += span
        return dims
    return [call.values["dim"] % call.values["self"].ndim]


def after_mixing(labels: Tensor, dims: Sequence[int], shape: torch.Size) -> Tensor:
    """Expand labels that do not vary along `dims` to the shape of the result."""
    for dim in dims:
        labels = labels.narrow(dim, 0, 1)
    if len(shape) < labels.ndim:
        labels = labels.squeeze(tuple(dims))
    return labels.expand(shape)


def move(node: fx.Node, lookup: Callable[[fx.Node], Any], args: Any = None) -> Any:
    """Run a movement on other tensors.

    Args:
        node: the operation.
        lookup: values of nodes.
        args: positional and keyword arguments instead of the node's own.
    """
    positional, keyword = fx.node.map_arg((node.args, node.kwargs) if args is None else args, lookup)
    target: Any = node.target
    if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        target = torch.ops.aten.reshape.default  # labels are broadcast in memory, where the activations are dense
    return target(*positional, **keyword)
