"""Matrix products on ARM CPUs.

There torch hands x Wᵀ to oneDNN, which arranges W anew in every call: of few examples or narrow layers that takes
several times as long as the product itself, and a tenth longer of many. BLAS gets along without, and is slower only of
many rows times matrices that are small, or have far more columns than rows, and of few where columns are a multiple of
2,048: rows of such matrices compete for the same places in a cache. Convolutions are better off with oneDNN but for a
few images, small LSTMs, too, and GELUs where there is much for them to do.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from bayeslim.types import modules_of

IS_ARM = platform.machine() == "aarch64"
FEW_ROWS = 8
"""Of so few torch does not ask oneDNN."""
ROWS, LITTLE, SHARE = 2**11, 2**14, 8
"""Of how many rows products are quicker by oneDNN, of layers of how few weights, or that take how many times as much as
they give."""
COMPETING, SEVERAL, SOME_ROWS = 2**11, 2**8, 192
"""Multiples of how many columns compete for a cache, from how many units on, in products of fewer than so many rows."""
LARGE = 2**20
"""Of how many weights of all networks x Wᵀ takes less time than W xᵀ, of as few rows, if they do not compete."""
_OTHERS = (_ConvNd, nn.RNNBase, nn.RNNCellBase)
_is_onednn_enabled, _enable_onednn = torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled
"""What `torch.backends.mkldnn.enabled` calls; to go through that takes as long as small products do."""
FEW, SMALL = 4, 2**16
"""Of how many images small convolutions, and of how many weights, are quicker by BLAS; others are of one image."""


def products_of(model: nn.Module, few: bool = False) -> AbstractContextManager[None]:
    """Passes of a network inside go by BLAS, if all that it multiplies are matrices in full precision.

    Args:
        model: the network.
        few: whether examples are so few that GELUs lose less than products gain.
    """
    others = _OTHERS if few else (*_OTHERS, nn.GELU)
    helps = IS_ARM and not torch.compiler.is_compiling() and _has_matrices_only(model, others)
    return by_blas() if helps else nullcontext()


def is_quicker_by_blas(x: Tensor, weight: Tensor) -> bool:
    """Whether x Wᵀ is worth going by BLAS, where there is a choice."""
    if not IS_ARM:
        return False
    outputs, inputs = weight.shape
    if competes(weight) and x.numel() < SOME_ROWS * inputs:
        return False
    most = ROWS * inputs if outputs * inputs <= LITTLE or inputs >= SHARE * outputs else math.inf
    return FEW_ROWS * inputs < x.numel() < most and bool(torch.backends.mkldnn.enabled)


def is_better_apart(model: nn.Module, rows: int) -> bool:
    """Whether some layers of a network are quicker by oneDNN, so that each should go as it is best."""
    if not IS_ARM or not FEW_ROWS < rows < SOME_ROWS:
        return False
    return any(map(competes, _matrices_of(model)))


def rows_along(weights: Tensor) -> int:
    """Up to how many rows a product of all networks' weights, x Wᵀ, takes less time than W xᵀ."""
    is_large = weights.numel() >= LARGE and not competes(weights[0])
    return SOME_ROWS - 1 if is_large else 0


def competes(weight: Tensor) -> bool:
    """Whether rows of a matrix compete for the same places in a cache."""
    return weight.shape[1] % COMPETING == 0 and weight.shape[0] >= SEVERAL


def _matrices_of(model: nn.Module) -> Iterator[Tensor]:
    for module in modules_of(model):
        for parameter in module._parameters.values():
            if parameter is not None and parameter.ndim == 2:
                yield parameter


def convolution_of(x: Tensor, weight: Tensor, groups: int) -> AbstractContextManager[None]:
    """A convolution inside goes by BLAS where that is quicker: up to four times, of one image and few channels."""
    few = groups == 1 and x.ndim == 4 and x.shape[0] <= (FEW if weight.numel() <= SMALL else 1)
    return by_blas() if IS_ARM and few and x.is_cpu and x.dtype == torch.float32 else nullcontext()


class without_onednn:  # noqa: N801 - read as words; a generator would take three times as long
    """Products inside go by BLAS, in full precision; the setting is that of the whole process."""

    everywhere = True

    def __enter__(self) -> None:
        self.changes = (self.everywhere or IS_ARM) and _is_onednn_enabled()
        if self.changes:
            _enable_onednn(False)

    def __exit__(self, *_: object) -> None:
        if self.changes:
            _enable_onednn(True)


class by_blas(without_onednn):  # noqa: N801
    """Products inside go by BLAS where that is quicker."""

    everywhere = False


def _has_matrices_only(model: nn.Module, others: tuple[type[nn.Module], ...]) -> bool:
    modules = modules_of(model)
    if any(isinstance(m, others) for m in modules):
        return False
    parameters = (p for m in modules for p in m._parameters.values() if p is not None)
    return all(p.dtype in (torch.float32, torch.float64) for p in parameters)
