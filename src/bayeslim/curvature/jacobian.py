"""Jacobians of the outputs in the weights, example by example.

J[n, c, s] = ∂ f_c(xₙ) / ∂ w_s for chosen weights s. A batch's Jacobian is outputs × weights numbers for every
example: `jacobians` yields it for a few examples at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bayeslim.curvature.example_gradients import Chosen, ExampleGradients, chosen_weights
from bayeslim.curvature.rows import GradientRows
from bayeslim.curvature.sweep import accumulation_dtype, evaluation_replica, examples, examples_at_once, with_gradients
from bayeslim.types import Inputs, batch_size, device_of, to_device


@torch.inference_mode(False)
def jacobian(model: nn.Module, inputs: Inputs, selection: Chosen = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the Jacobians of a batch, (B, outputs, S), outputs flattened.

    Args:
        model: in any mode; it is not changed.
        inputs: of the model.
        selection: parameter names, or flat indices by parameter name (None for all of a parameter); by default every
            trainable parameter, in the model's order.
        dtype: of the result; by default the model's, at least float32.
    """
    return torch.cat([J for _, J in jacobians(model, inputs, selection, dtype=dtype)])


def jacobians(
    model: nn.Module,
    inputs: Inputs,
    selection: Chosen = None,
    *,
    dtype: torch.dtype | None = None,
    at_once: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs (b, ...) and Jacobians (b, outputs, S), a few examples at a time.

    Args:
        model: in any mode; it is not changed.
        inputs: of the model.
        selection: as for `jacobian`.
        dtype: of the Jacobians.
        at_once: how many examples; by default as many as bounded memory holds.
    """
    weights = chosen_weights(model, selection)
    dtype = accumulation_dtype(model, dtype)
    inputs = to_device(inputs, device_of(model))
    total = batch_size(inputs)
    gradients = ExampleGradients(evaluation_replica(model, inputs), weights)
    rows = GradientRows(gradients, weights, dtype)
    start = 0
    step = at_once or 1
    while start < total:
        stop = min(start + step, total)
        with with_gradients(), gradients:  # not held across the yield: the thread's modes are the caller's there
            outputs, J = _block(rows, examples(inputs, start, stop, total))
        yield outputs, J
        start = stop
        step = at_once or examples_at_once(J[0].numel() * dtype.itemsize, J.device)


def _block(rows: GradientRows, inputs: Inputs) -> tuple[Tensor, Tensor]:
    gradients = rows.gradients
    outputs = gradients.forward(inputs)
    width = outputs[0].numel()
    J = torch.zeros(outputs.shape[0], width, sum(rows.sizes.values()), dtype=rows.dtype, device=outputs.device)
    first = 0
    for backward in gradients.backward(inputs, outputs, _one_hot(outputs)):
        columns = backward.columns.shape[0]
        for start, found in rows(backward):
            J[start : start + found.shape[1], first : first + columns] = found.transpose(0, 1)
        first += columns
    return outputs.detach(), J


def _one_hot(outputs: Tensor) -> Iterator[Tensor]:
    for c in range(outputs[0].numel()):
        column = torch.zeros(outputs.shape[0], outputs[0].numel(), dtype=outputs.dtype, device=outputs.device)
        column[:, c] = 1
        yield column.view(outputs.shape)
