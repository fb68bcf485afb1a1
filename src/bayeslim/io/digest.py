"""A hash of tensors and texts, to tell other weights or data apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def digest(parts: Iterable[Tensor | str]) -> str:
    """Hash values, shapes and dtypes of tensors, and texts, in their order.

    >>> digest(["weight", torch.zeros(2)]) == digest(["weight", torch.zeros(1, 2)])
    False
    """
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            found.update(f"{tuple(part.shape)} {part.dtype};".encode())
            flat = part.detach().cpu().resolve_conj().contiguous().flatten()
            found.update(flat.view(torch.uint8).numpy().data)
        else:
            found.update(f"{part};".encode())
    return found.hexdigest()
