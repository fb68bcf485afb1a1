"""Two networks give the same answers: checked on the example and on random inputs like it.

In double precision where the networks run in it, so that a fault cannot hide behind rounding.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayeslim.compact.trace import run_example
from bayeslim.errors import UnsupportedModel
from bayeslim.types import Inputs, device_of, to_device

_ROUNDING = {torch.float64: 0.0, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Proof:
    """How far two networks are apart.

    Attributes:
        difference: the largest difference between their outputs, relative to the largest output; infinite if the
            second fails.
        holds: whether that is within the tolerance.
    """

    difference: float
    holds: bool


def compare(masked: nn.Module, slim: nn.Module, example: Inputs, tolerance: float) -> Proof:
    """Compare a network with a reference.

    Args:
        masked: the reference, in eval mode.
        slim: the other network, in eval mode.
        example: inputs.
        tolerance: the difference allowed in double precision; in another, the rounding of that comes on top.

    Raises:
        UnsupportedModel: if the reference does not repeat itself, or gives no finite output.
    """
    example = to_device(example, device_of(masked))
    _check_reference(masked, example)
    reference, other, dtype = _in_double(masked, slim, example)
    worst = 0.0
    for inputs in _like(example):
        expected = run_example(reference, _cast(inputs, dtype))
        try:
            actual = run_example(other, _cast(inputs, dtype))
        except Exception:
            return Proof(float("inf"), False)
        worst = max(worst, _relative(_tensors(expected), _tensors(actual)))
        precision = _tensors(expected)[0].dtype
        if worst > tolerance + _ROUNDING.get(precision, 0.0):
            return Proof(worst, False)
    return Proof(worst, True)


def _in_double(masked: nn.Module, slim: nn.Module, example: Inputs) -> tuple[nn.Module, nn.Module, torch.dtype | None]:
    try:
        wide = copy.deepcopy(masked).double(), copy.deepcopy(slim).double()
        with torch.no_grad():
            for network in wide:
                run_example(network, _cast(example, torch.float64))
    except Exception:
        return masked, slim, None
    return *wide, torch.float64


def _check_reference(masked: nn.Module, example: Inputs) -> None:
    first, second = _tensors(run_example(masked, example)), _tensors(run_example(masked, example))
    if not all(bool(torch.isfinite(x).all()) for x in first):
        raise UnsupportedModel(
            f"{type(masked).__name__} gives infinite or undefined outputs on the example: nothing can be checked. "
            "Use an example on which the network works."
        )
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise UnsupportedModel(
            f"{type(masked).__name__} gives different outputs for the same input in eval mode, so a smaller network "
            "cannot be compared with it. Make its forward deterministic in eval mode."
        )


def _like(example: Inputs) -> list[Inputs]:
    """The example, and two random inputs like it: noise of its scale, and its integers in another order."""
    generator = torch.Generator().manual_seed(0)

    def randomise(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype == torch.bool or not x.numel():
            return x
        if not x.is_floating_point():
            return x.flatten()[torch.randperm(x.numel(), generator=generator).to(x.device)].view(x.shape)
        scale = x.float().std(correction=0).clamp(min=0.1) if x.numel() > 1 else torch.ones(())
        noise = torch.randn(x.shape, generator=generator).to(x.device)
        return (x.float().mean() + 1.5 * scale * noise).to(x.dtype)

    return [example, *(pytree.tree_map(randomise, example) for _ in range(2))]


def _cast(inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    def cast(x: Any) -> Any:
        return x.to(dtype) if dtype is not None and isinstance(x, Tensor) and x.is_floating_point() else x

    return pytree.tree_map(cast, inputs)


def _relative(expected: list[Tensor], actual: list[Tensor]) -> float:
    if [x.shape for x in expected] != [x.shape for x in actual]:
        return float("inf")
    worst = 0.0
    for a, b in zip(expected, actual, strict=True):
        finite = torch.isfinite(a)
        if not torch.equal(finite, torch.isfinite(b)):
            return float("inf")
        gap, scale = (a[finite].double() - b[finite].double()).abs(), a[finite].double().abs()
        if gap.numel():
            worst = max(worst, float(gap.max()) / max(float(scale.max()), 1e-12))
    return worst


def _tensors(output: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
