"""Matrix products on ARM CPUs.

There torch hands x Wᵀ to oneDNN, which arranges W anew in every call: of few examples or narrow layers that takes
several times as long as the product itself, and a tenth longer of many. BLAS gets along without. Convolutions and
recurrent layers are better off with oneDNN.
"""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from bayeslim.types import modules_of

IS_ARM = platform.machine() == "aarch64"


def products_of(model: nn.Module) -> AbstractContextManager[None]:
    """Passes of a network inside go by BLAS, if all that it multiplies are matrices in full precision."""
    helps = IS_ARM and not torch.compiler.is_compiling() and _has_matrices_only(model)
    return by_blas() if helps else nullcontext()


class by_blas:  # noqa: N801 - read as a verb; a generator would take three times as long
    """Products inside go by BLAS where that is quicker; the setting is that of the whole process."""

    def __enter__(self) -> None:
        self.changes = IS_ARM and bool(torch.backends.mkldnn.enabled)
        if self.changes:
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        if self.changes:
            torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


def _has_matrices_only(model: nn.Module) -> bool:
    modules = modules_of(model)
    if any(isinstance(m, (_ConvNd, nn.RNNBase, nn.RNNCellBase)) for m in modules):
        return False
    parameters = (p for m in modules for p in m._parameters.values() if p is not None)
    return all(p.dtype in (torch.float32, torch.float64) for p in parameters)
