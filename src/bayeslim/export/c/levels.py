"""Weights with few distinct values: a table of levels, an index per weight, and a factor per output."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bayeslim.export.c.steps import Program, Step, Weighted
from bayeslim.quantise.grids import Uniform
from bayeslim.quantise.result import Quantised

MAX_LEVELS = 256
"""An index into the table is one byte."""


def find_levels(program: Program, quantised: Quantised | None) -> Program:
    """Find the levels of every weight: quantised codes, or its distinct values."""
    return replace(program, steps=tuple(_with_levels(step, quantised) for step in program.steps))


def _with_levels(step: Step, quantised: Quantised | None) -> Step:
    if not isinstance(step, Weighted):
        return step
    levels, row_scale = step.weight, np.ones(len(step.weight), np.float32)
    if quantised is not None and step.parameter in quantised.codes:
        grid = quantised.grids[step.parameter].cpu()
        if isinstance(grid, Uniform):
            codes = quantised.codes[step.parameter].cpu().numpy().astype(np.float32)
            levels = codes.reshape(step.weight.shape)
            row_scale = np.broadcast_to(grid.scale.reshape(-1).numpy(), row_scale.shape).astype(np.float32)
    nonzeros = levels[levels != 0]
    distinct = len(np.unique(nonzeros))
    if distinct > MAX_LEVELS - 1 or 4 * distinct + 4 * len(row_scale) > 3 * len(nonzeros):
        return step  # a table would take more bytes than it saves
    return replace(step, levels=levels, row_scale=row_scale)
