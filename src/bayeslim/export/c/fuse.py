"""Fusion of steps: batch norms into weights, activations and pooling into the step before."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from bayeslim.export.c.steps import Add, Affine, Floats, Pool, Program, Step, Weighted, Window


def fuse(program: Program) -> Program:
    """Fuse every step that is the only reader of the step before it."""
    readers = Counter(number for step in program.steps for number in step.inputs)
    readers[program.output] += 1
    steps: list[Step] = []
    for step in program.steps:
        maker = next((place for place, one in enumerate(steps) if one.output == step.inputs[0]), None)
        fused = None
        if maker is not None and len(step.inputs) == 1 and readers[step.inputs[0]] == 1:
            fused = _joined(steps[maker], step)
        if fused is None or maker is None:
            steps.append(step)
        else:
            steps[maker] = fused
    return replace(program, steps=tuple(steps))


def _joined(first: Step, second: Step) -> Step | None:
    """Compute both steps in one; None if that is impossible."""
    is_pooled = isinstance(first, Weighted) and first.pool is not None
    if isinstance(second, Affine) and not is_pooled and first.activation is None:
        is_identity = len(second.scale) == 1 and float(second.scale[0]) == 1.0 and float(second.shift[0]) == 0.0
        if is_identity and isinstance(first, (Weighted, Add, Affine)):
            return replace(first, output=second.output, activation=second.activation)
        if isinstance(first, Weighted) and len(second.scale) == first.out_shape[0] > 1:
            return replace(
                first,
                output=second.output,
                weight=_scaled(first.weight, second.scale),
                bias=(first.bias * second.scale + second.shift).astype(np.float32),
                activation=second.activation,
                row_scale=None if first.row_scale is None else (first.row_scale * second.scale).astype(np.float32),
            )
    if isinstance(first, Weighted) and isinstance(second, Window) and not is_pooled and not first.is_vector:
        is_plain = second.stride == second.size and second.padding == (0, 0) and second.dilation == (1, 1)
        if is_plain and second.activation is None and second.in_shape == first.out_shape:
            pool = Pool(second.kind, *second.size)
            return replace(first, output=second.output, out_shape=second.out_shape, pool=pool)
    return None


def _scaled(weight: Floats, scale: Floats) -> Floats:
    found: Floats = (weight * scale[:, None, None, None]).astype(np.float32)
    return found
