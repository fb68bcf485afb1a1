"""Embeddings of several networks at once, where all positions of an example are made one row: bags of words.

Of many positions that is one pass over a table in which rows of all networks lie beside each other, in half the time or
less of one network after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeslim.graphs import Call

READ, FEW = 2**17, 2**14
"""How many numbers of tables are quicker to read before they are joined, of all networks together, and of each where
tables are too large to be copied."""
COPIED = 2**24
"""How many numbers tables of all networks may have that are copied."""

_JOINED: dict[Any, str] = {
    torch.mean: "mean", "mean": "mean", torch.sum: "sum", "sum": "sum", torch.amax: "max", "amax": "max"
}  # fmt: skip
"""What makes one row of those at all positions, as `F.embedding_bag` calls it."""


class Table:
    """An embedding of every network, with its positions made one row.

    Few rows are read from the particles as they lie. For many a copy is kept in which those of all networks lie beside
    each other: one pass reads and joins them, without writing them down before.

    Args:
        values: (S, rows, features).
        joined: how, "mean", "sum" or "max".
    """

    def __init__(self, values: Tensor, joined: str):
        self.values, self.joined = values, joined
        self.beside: Tensor | None = None
        self.version = -1

    def __call__(self, x: Tensor) -> Tensor:
        """Positions, (B, positions), to rows, (S, B, features)."""
        members, _, features = self.values.shape
        if x.numel() * members * features > READ and self.values.numel() <= COPIED:
            return F.embedding_bag(x, self._side_by_side(), mode=self.joined).view(len(x), members, -1).transpose(0, 1)
        rows = self.values.index_select(1, x.reshape(-1)).view(members, *x.shape, features)
        if self.joined == "mean":
            return rows.mean(2)
        return rows.sum(2) if self.joined == "sum" else rows.amax(2)

    def _side_by_side(self) -> Tensor:
        if self.beside is None or self.version != self.values._version:
            self.beside, self.version = self.values.transpose(0, 1).flatten(1), self.values._version
        return self.beside


def begins_with_table(model: nn.Sequential) -> bool:
    """Whether the first layer is an embedding."""
    return isinstance(next(iter(model), None), (nn.Embedding, nn.EmbeddingBag))


def are_tables_quick(model: Any, members: int, x: Tensor) -> bool:
    """Whether networks that begin with one are worth calling at once: not if much is read of what cannot be copied."""
    table = next(iter(model))
    return bool(x.numel() * table.embedding_dim <= FEW or members * table.weight.numel() <= COPIED)


def joined_by(layer: nn.Module | None) -> str | None:
    """How a layer makes one row of those at all positions; None if it does something else."""
    if not isinstance(layer, Call) or [*layer.args, *layer.kwargs.values()] not in ([1], [-2]):
        return None
    return _JOINED.get(layer.target) if layer.kwargs.keys() <= {"dim"} else None
