"""Labels of channels, and the classes of channels that must be removed together.

A channel (a neuron, a feature map, one dimension of an attention head) gets an integer, its *label*. Tensors of
labels have the shape of the activations they describe; since a label is shared by a whole slab (every example, every
pixel of a feature map), they are stored with stride 0 along every dimension in which they do not vary, so that a
label costs memory per channel, not per element.

Classes are kept in a union-find forest. A label can be *frozen*: its whole class then stays, with the reason given.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def settle(labels: Tensor) -> Tensor:
    """Give a tensor stride 0 along each dimension in which it does not vary."""
    base = slim(labels)
    for dim in range(base.ndim):
        if base.shape[dim] > 1 and bool((base == base.narrow(dim, 0, 1)).all()):
            base = base.narrow(dim, 0, 1)
    return base.contiguous().expand(labels.shape)


def slim(labels: Tensor) -> Tensor:
    """View `labels` with size 1 along every dimension of stride 0."""
    for dim in range(labels.ndim):
        if labels.shape[dim] > 1 and labels.stride(dim) == 0:
            labels = labels.narrow(dim, 0, 1)
    return labels


def varying(labels: Tensor) -> list[int]:
    """List the dimensions along which settled labels vary."""
    return [dim for dim, size in enumerate(slim(labels).shape) if size > 1]


class Labels:
    """A union-find forest over labels, with reasons to stay.

    *Fixed* labels mark tensors without removable channels (the network's input, the result of an unknown operation).
    They are never merged: labels that are tied to them are frozen instead, so that classes stay small.
    """

    def __init__(self) -> None:
        self._parent = np.zeros(1024, dtype=np.int64)
        self._fixed = np.zeros(1024, dtype=bool)
        self._size = 0
        self.reasons: dict[int, str] = {}
        self._fixed_by_reason: dict[str, int] = {}

    def mint(self, *shape: int) -> Tensor:
        """Make new labels, all different."""
        count = int(np.prod(shape, dtype=np.int64))
        start, self._size = self._size, self._size + count
        while self._size > len(self._parent):
            self._parent = np.concatenate([self._parent, np.zeros_like(self._parent)])
            self._fixed = np.concatenate([self._fixed, np.zeros_like(self._fixed)])
        self._parent[start : self._size] = np.arange(start, self._size)
        return torch.arange(start, self._size).view(shape)

    @property
    def count(self) -> int:
        """The number of labels."""
        return self._size

    def fixed(self, reason: str, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """Return a tensor of one label that always stays, for a reason."""
        if reason not in self._fixed_by_reason:
            label = int(self.mint(1))
            self._fixed[label] = True
            self.reasons[label] = reason
            self._fixed_by_reason[reason] = label
        return torch.tensor(self._fixed_by_reason[reason]).expand(tuple(shape))

    def is_fixed(self, labels: Tensor) -> Tensor:
        """Mark the labels that are fixed."""
        return torch.from_numpy(np.asarray(self._fixed[labels.numpy()]))

    def find(self, labels: Tensor) -> Tensor:
        """Return the representative of each label's class, settled."""
        ids = slim(labels).numpy()
        while True:
            up = self._parent[ids]
            if np.array_equal(up, ids):
                return settle(torch.from_numpy(np.asarray(up)).expand(labels.shape))
            self._parent[ids] = self._parent[up]
            ids = up

    def tie(self, a: Tensor, b: Tensor) -> None:
        """Unite broadcast labels element by element; a fixed label freezes the other."""
        a, b = torch.broadcast_tensors(slim(a), slim(b))
        pairs = torch.stack([slim(a).expand(a.shape).reshape(-1), slim(b).expand(b.shape).reshape(-1)])
        pairs = pairs[:, pairs[0] != pairs[1]]
        if not pairs.numel():
            return
        left, right = torch.unique(pairs, dim=1)
        for one, other in ((left, right), (right, left)):
            stuck = self.is_fixed(one) & ~self.is_fixed(other)
            for label in torch.unique(one[stuck]).tolist():
                self.freeze(other[stuck & (one == label)], self.reasons[label])
        free = ~(self.is_fixed(left) | self.is_fixed(right))
        x, y = left[free], right[free]
        while x.numel():
            x, y = self.find(x), self.find(y)
            apart = x != y
            x, y = x[apart], y[apart]
            low, high = torch.minimum(x, y).numpy(), torch.maximum(x, y).numpy()
            np.minimum.at(self._parent, high, low)

    def unite_along(self, labels: Tensor, dims: list[int]) -> Tensor:
        """Unite `labels` along `dims`; return the representatives, settled."""
        found = self.find(labels)
        for dim in dims:
            if dim in varying(found):
                self.tie(found, found.narrow(dim, 0, 1))
                found = self.find(found)
        return found

    def freeze(self, labels: Tensor, reason: str) -> None:
        """Keep these labels, and so their classes; the first reason is kept."""
        for label in torch.unique(slim(labels)).tolist():
            self.reasons.setdefault(label, reason)

    def all_frozen(self, labels: Tensor) -> bool:
        """Return whether the classes of all these labels stay."""
        frozen = self.frozen()
        return all(root in frozen for root in torch.unique(slim(self.find(labels))).tolist())

    def frozen(self) -> dict[int, str]:
        """Return the reason of each frozen class, by representative."""
        marked = list(self.reasons)
        roots = self.find(torch.tensor(marked, dtype=torch.int64)).tolist() if marked else []
        result: dict[int, str] = {}
        for label, root in zip(marked, roots, strict=True):
            result.setdefault(root, self.reasons[label])
        return result
