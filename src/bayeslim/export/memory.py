"""The memory of a call: the weights, and the peak of its live tensors.

It is counted in tensors rather than read from the operating system, so that it is exact, repeatable and independent of
the rest of the process. The workspace of kernels is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bayeslim.compact.example import run_example
from bayeslim.types import Inputs


class LiveTensors(TorchDispatchMode):
    """A mode that counts the bytes of live tensors made inside it, but for known ones.

    Attributes:
        live: the bytes now.
        peak: the largest number of bytes so far.
    """

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.live = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self._known = known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count its results."""
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(storage._cdata)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def peak_bytes(network: nn.Module, example: Inputs) -> int:
    """Sum the bytes of weights, buffers and the peak of live tensors in a call.

    >>> peak_bytes(nn.Linear(8, 4), torch.zeros(2, 8))  # 36 weights and 2 · 4 outputs
    176
    """
    weights = {id(t): t for t in (*network.parameters(), *network.buffers())}
    inputs = [x for x in pytree.tree_leaves(example) if isinstance(x, Tensor)]
    counter = LiveTensors([*weights.values(), *inputs])
    with counter:
        run_example(network, example)
    return sum(t.numel() * t.element_size() for t in weights.values()) + counter.peak
