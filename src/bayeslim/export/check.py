"""The comparison of an exported network with the original."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.attention import ExplicitAttention
from bayeslim.compact.example import rows_of, run_example, tensors_in
from bayeslim.compact.program import first_line
from bayeslim.errors import BayeslimError
from bayeslim.types import Inputs

_RELATIVE_ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


class ExportFailed(BayeslimError, RuntimeError):
    """The exported network gives other outputs; nothing was written."""


def difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Return the largest difference relative to the largest output."""
    if [x.shape for x in expected] != [x.shape for x in actual]:
        return float("inf")
    worst = largest = 0.0
    for a, b in zip(expected, actual, strict=True):
        if a.numel():
            a, b = a.detach().double(), b.detach().double()
            gap = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0)
            worst = max(worst, float(gap.nan_to_num(torch.inf).max()))
            largest = max(largest, float(a.abs().masked_fill(~a.isfinite(), 0).max()))
    return worst / max(largest, 1e-12)


def prove(
    network: nn.Module, run: Callable[[Inputs], Any], inputs: Sequence[Inputs], what: str, tolerance: float
) -> float:
    """Compare an exported network with the original; return their difference.

    Args:
        network: the original, in eval mode.
        run: a function that calls the exported one.
        inputs: the inputs of both.
        what: the format, for messages.
        tolerance: the difference allowed in single precision; in half precision its rounding is added.

    Raises:
        ExportFailed: if it fails, or the difference is larger.
    """
    worst = 0.0
    for example in inputs:
        with ExplicitAttention():
            expected = tensors_in(run_example(network, example))
        if any(bool(x.isnan().any()) for x in expected):
            raise ExportFailed(
                f"{type(network).__name__} gives NaN on the example, so the {what} file could not be compared with it. "
                "Pass an example without NaN, on which the network gives numbers."
            )
        rounding = max((_RELATIVE_ROUNDING.get(x.dtype, 0.0) for x in expected), default=0.0)
        try:
            actual = tensors_in(run(example))
        except Exception as error:
            raise ExportFailed(
                f"The {what} file of {type(network).__name__} fails on a batch of {rows_of(example)}, which the "
                f"network itself takes: {first_line(error)} Nothing was written. If only one batch size works, the "
                "forward fixes it: take sizes from x.shape, not from len(x) or constants."
            ) from error
        theirs, ours = ([tuple(x.shape) for x in outputs] for outputs in (expected, actual))
        if theirs != ours:
            raise ExportFailed(
                f"The {what} file of {type(network).__name__} gives other outputs than the network on a batch of "
                f"{rows_of(example)}: shapes {ours} instead of {theirs}. Nothing was written. If the forward drops a "
                "dimension of size one, name it: squeeze(-1), not squeeze()."
            )
        worst = max(worst, difference(expected, actual))
        if worst > tolerance + rounding:
            raise ExportFailed(
                f"The {what} file of {type(network).__name__} gives other outputs than the network on a batch of "
                f"{rows_of(example)}: they differ by {worst:.2g} of the largest output (tolerance {tolerance:.2g}). "
                "Nothing was written. Raise tolerance if that is only rounding, as in a very deep network."
            )
    return worst
