"""Shrunk tensors: the indices that stay, and the new constants of the graph.

A graph holds sizes as plain numbers: `view(x, [-1, 800])`, `split(x, 64)`, `x[:, :32]`, the groups of a convolution.
Each is rewritten from the labels of its tensors. A movement is legal if the rewritten operation, run on the labels that
stay, gives exactly the labels that should stay of its result; otherwise its classes are kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from bayeslim.compact.channels import Channels
from bayeslim.compact.labels import varying
from bayeslim.compact.ops import CREATION, INDEXING, MOVEMENT, move, words
from bayeslim.compact.trace import op_name

_SIZED = {"view", "_unsafe_view", "reshape", "expand", "broadcast_to", *CREATION}
_SPLITS = words("split unsafe_split chunk unsafe_chunk split_with_sizes unsafe_split_with_sizes tensor_split")


class Shrinking:
    """The tensors of a graph once the classes marked in `gone` are removed.

    Args:
        channels: the labelled channels.
        gone: mask over all labels, by representative.
    """

    def __init__(self, channels: Channels, gone: Tensor):
        self.channels = channels
        self.gone = gone

    def kept(self, labels: Tensor) -> tuple[int, Tensor] | None:
        """Return the dimension that shrinks and the indices that stay, or None."""
        found = self.channels.labels.find(labels)
        dims = varying(found)
        if not dims:
            return None
        line = found
        for dim in range(found.ndim):
            if dim != dims[0]:
                line = line.narrow(dim, 0, 1)
        stay = ~self.gone[line.reshape(-1)]
        return None if bool(stay.all()) else (dims[0], stay.nonzero().flatten())

    def of(self, labels: Tensor) -> Tensor:
        """Return the part of a tensor of labels that stays."""
        found, kept = self.channels.labels.find(labels), self.kept(labels)
        return found if kept is None else found.index_select(*kept)

    def arguments(self, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Rewrite an operation: return its function, positional and keyword arguments.

        Raises:
            ValueError: if it cannot work on the smaller tensors.
        """
        name, kwargs = op_name(node), dict(node.kwargs)
        args: list[Any] = list(node.args)
        source: Any = args[0] if args else None
        labels: Any = self.channels.of.get(node)
        if name in _SIZED:
            shrunk = self._shrunk_dims(node)
            place = next((i for i, arg in enumerate(args) if isinstance(arg, (list, tuple))), None)
            if shrunk and place is not None:
                args[place] = _resized(args[place], shrunk)
        elif name in _SPLITS and any(self.kept(part) is not None for part in labels):
            dim: Any = args[2] if len(args) > 2 else kwargs.get("dim", 0)
            sizes = [self.of(part).shape[dim] for part in labels]
            return torch.ops.aten.split_with_sizes.default, (args[0], sizes, dim), {}
        elif name == "unflatten":
            shrunk = self._shrunk_dims(node)
            start = args[1] % len(source.meta["val"].shape) - len(node.meta["val"].shape)
            inside = {place: size for place, size in shrunk.items() if start <= place < start + len(args[2])}
            args[2] = _resized(args[2], {place - start - len(args[2]): size for place, size in inside.items()})
        elif name in ("slice", "select") and self._source(node) is not None:
            self._offsets(node, name, args)
        elif node in self.channels.groups:
            self._groups(node, args, kwargs)
        elif name == "scaled_dot_product_attention" and kwargs.get("scale") is None:
            kwargs["scale"] = 1 / math.sqrt(self.channels.of[source].shape[-1])
        return node.target, tuple(args), kwargs

    def illegal(self) -> list[fx.Node]:
        """List the operations that cannot work on the smaller tensors."""
        return [node for node in list(self.channels.of) if node.op == "call_function" and not self._is_legal(node)]

    def _is_legal(self, node: fx.Node) -> bool:
        labels = self.channels.of[node]
        parts = [part for part in (labels if isinstance(labels, list) else [labels]) if part is not None]
        touched = [
            *parts,
            *(self.channels.of[n] for n in node.all_input_nodes if isinstance(self.channels.of.get(n), Tensor)),
        ]
        if all(self.kept(part) is None for part in touched):
            return True
        try:
            target, args, kwargs = self.arguments(node)
            if op_name(node) not in MOVEMENT | INDEXING or labels is None:
                return True
            mapped = fx.node.map_arg(args, self._lookup)
            result = move(node, self._lookup, (args, kwargs)) if target is node.target else target(*mapped)
        except (ValueError, RuntimeError, IndexError):
            return False
        if node in self.channels.copied:
            return bool(result.shape == self.of(labels).shape)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        return len(results) == len(parts) and all(
            torch.equal(a, self.of(b)) for a, b in zip(results, parts, strict=True)
        )

    def _shrunk_dims(self, node: fx.Node) -> dict[int, int]:
        """Return the new sizes by dimension, counted from the right."""
        labels = self.channels.of.get(node)
        if labels is not None:
            kept = self.kept(labels)
            return {} if kept is None else {kept[0] - labels.ndim: len(kept[1])}
        found = self.channels.weight(node)
        if found is None:
            return {}
        name, dims = found
        lines = {place - len(dims): self.channels.axes.get((name, dim)) for place, dim in enumerate(dims)}
        kept_lines = {place: self.kept(axis.labels) for place, axis in lines.items() if axis is not None}
        return {place: len(kept[1]) for place, kept in kept_lines.items() if kept is not None}

    def _lookup(self, node: fx.Node) -> Any:
        if node in self.channels.scalars or not self.channels.known(node):
            return self.channels.scalar(node)
        return self.of(self.channels.read(node))

    def _source(self, node: fx.Node) -> tuple[int, Tensor] | None:
        source = self.channels.of.get(node.args[0])  # type: ignore[arg-type]
        return None if source is None else self.kept(source)

    def _offsets(self, node: fx.Node, name: str, args: list[Any]) -> None:
        """Rewrite start, end or index along the shrinking dimension."""
        source: Tensor = self.channels.of[node.args[0]]  # type: ignore[index]
        dim, places = self._source(node)  # type: ignore[misc]
        along = (args[1] if len(args) > 1 else 0) % source.ndim
        if along != dim:
            return
        size = source.shape[dim]
        for place in range(2, min(len(args), 4)):
            if isinstance(args[place], fx.Node):
                raise ValueError("an offset that depends on the input")
            if args[place] is not None:
                offset = args[place] + size if args[place] < 0 else min(args[place], size)
                if name == "select" and offset not in places:
                    raise ValueError("a channel picked by number")
                args[place] = int((places < offset).sum())

    def _groups(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> None:
        source = self.channels.of[node.args[0]]  # type: ignore[index]
        kept = self.kept(source)
        if kept is None:
            return
        groups = len(kept[1]) // self.channels.groups[node]
        place = [argument.name for argument in node.target._schema.arguments].index(_group_argument(node))  # type: ignore[union-attr]
        if place < len(args):
            args[place] = groups
        else:
            kwargs[_group_argument(node)] = groups


def _group_argument(node: fx.Node) -> str:
    return "num_groups" if op_name(node) == "group_norm" else "groups"


def _resized(sizes: Any, shrunk: dict[int, int]) -> list[Any]:
    result: list[Any] = list(sizes)
    for place, size in shrunk.items():
        if isinstance(result[place], fx.Node):
            if -1 in result:
                raise ValueError("two sizes would have to be inferred")
            result[place] = -1
        elif result[place] != -1:
            result[place] = size
    return result
