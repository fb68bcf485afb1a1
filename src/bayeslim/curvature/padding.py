"""Padding, which an attention mask leaves out: it counts in no second moment."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bayeslim.types import Inputs


def real_positions(inputs: Inputs) -> Tensor | None:
    """Find the positions that are no padding, True in (B, T).

    Returns:
        None where all positions count: without an attention mask of examples and positions, and for an encoder with a
        decoder, whose layers do not all read the positions of one mask.
    """
    if not isinstance(inputs, Mapping) or any(str(key).startswith("decoder_") for key in inputs):
        return None
    mask = inputs.get("attention_mask")
    return mask != 0 if isinstance(mask, Tensor) and mask.ndim == 2 else None


def without_padding(rows: Tensor, real: Tensor | None) -> Tensor:
    """Take the real positions of rows (B, T, D) or (B T, D), as (n, D).

    Rows of other shapes are returned whole.
    """
    if real is None:
        return rows
    if rows.shape[:-1] == real.shape:
        return rows[real]
    return rows[real.flatten()] if rows.shape[:-1] == (real.numel(),) else rows
