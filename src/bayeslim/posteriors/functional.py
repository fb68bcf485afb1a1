"""The output covariance of a linearised layer, J Σ Jᵀ, without the Jacobian J.

A layer y = V ã used at positions t has J_c = Σ_t g_ct ã_tᵀ for output c, with g the gradients of the network's outputs
with respect to y. For independent weights with variances σ² and one position,

    Cov_cc' = Σ_o (Σ_i ã_i² σ²_oi) g_co g_c'o.

A Kronecker layer is of this form in its eigenbasis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from bayeslim.errors import ShapeMismatch
from bayeslim.posteriors.layer_matrix import LayerMatrix

Turn: TypeAlias = Callable[[Tensor], Tensor]

MAX_NUMBERS_PER_CHUNK = 2**25
"""Summed gradients are formed in chunks of examples that hold at most this many numbers, or one example."""


def diagonal_functional_covariance(
    layer: LayerMatrix, variance: Mapping[str, Tensor], inputs: Tensor, gradients: Tensor
) -> Tensor:
    """Compute the output covariance due to a layer's independent weights.

    Args:
        layer: the layer's layout.
        variance: marginal variances by name, of at least the layer's parameters.
        inputs: the layer's input features at every position, (B, T, groups · inputs), without the bias's 1.
        gradients: gradients of each network output with respect to the layer's, (C, B, T, groups · outputs).

    Returns:
        (B, C, C).
    """
    matrix = layer.matrix(variance)
    return gradient_covariance(matrix, *positions(layer, inputs.to(matrix), gradients.to(matrix)))


def positions(layer: LayerMatrix, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Shape inputs, with the bias's 1, and gradients by position and group.

    Returns:
        (B, T, groups, inputs) and (B, C, T, groups, outputs).
    """
    groups, outputs, width = layer.size
    features = width - (layer.bias is not None)
    fits = (
        inputs.ndim == 3
        and inputs.shape[2] == groups * features
        and gradients.ndim == 4
        and gradients.shape[1:] == (*inputs.shape[:2], groups * outputs)
    )
    if not fits:
        raise ShapeMismatch(
            f'The inputs of "{layer.weight}" must be (B, T, {groups * features}) and the gradients '
            f"(C, B, T, {groups * outputs}). Got {tuple(inputs.shape)} and {tuple(gradients.shape)}."
        )
    a = inputs.reshape(*inputs.shape[:2], groups, features)
    if layer.bias is not None:
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
    return a, gradients.transpose(0, 1).unflatten(-1, (groups, outputs))


def gradient_covariance(
    variance: Tensor, a: Tensor, g: Tensor, turn_inputs: Turn | None = None, turn_outputs: Turn | None = None
) -> Tensor:
    """Compute Σ_oi J_coi σ²_oi J_c'oi with J = Σ_t g_t a_tᵀ, in chunks of examples.

    Args:
        variance: σ², (groups, outputs, inputs).
        a: (B, T, groups, inputs).
        g: (B, C, T, groups, outputs).
        turn_inputs: rotates vectors (..., groups, inputs) into the basis of σ², Q_Aᵀ a.
        turn_outputs: likewise, Q_Gᵀ g.

    Returns:
        (B, C, C).
    """
    examples, classes, uses, _, outputs = g.shape
    # J is rotated instead where it has fewer vectors
    if turn_inputs is not None and uses <= classes * outputs:
        a, turn_inputs = turn_inputs(a), None
    if turn_outputs is not None and uses <= a.shape[-1]:
        g, turn_outputs = turn_outputs(g), None
    if uses == 1:
        spread = torch.einsum("bgi,goi->bgo", a[:, 0].square(), variance)
        return _gram((g[:, :, 0] * spread.sqrt()[:, None]).flatten(2)[:, None])
    std = variance.sqrt().unsqueeze(2)
    step = max(1, MAX_NUMBERS_PER_CHUNK // (classes * std.numel()))
    covariance = g.new_empty(examples, classes, classes)
    for start in range(0, examples, step):
        part = slice(start, start + step)
        J = _gradients(g[part], a[part])
        if turn_inputs is not None:
            J = turn_inputs(J.movedim(1, -2)).movedim(-2, 1)
        if turn_outputs is not None:
            J = turn_outputs(J.permute(0, 3, 4, 1, 2)).permute(0, 3, 4, 1, 2)
        covariance[part] = _gram(J.mul_(std).flatten(1, 2))
    return covariance


def _gradients(g: Tensor, a: Tensor) -> Tensor:
    """Compute J = Σ_t g_t a_tᵀ, (B, groups, outputs, C, inputs), laid out for `_gram`."""
    if g.device.type == "cpu":
        return torch.einsum("bctgo,btgi->bgioc", g, a).permute(0, 1, 3, 4, 2)
    return torch.einsum("bctgo,btgi->bgoci", g, a)


def _gram(x: Tensor) -> Tensor:
    """Sum the products x_m x_mᵀ of each example, (B, M, C, n) to (B, C, C)."""
    if x.device.type != "cpu":
        return (x @ x.mT).sum(1)  # many small products use a GPU better than few long ones
    x = x.permute(0, 3, 1, 2).flatten(1, 2).contiguous()  # with outputs last in memory, products are fast on a CPU
    return x.mT @ x
