"""Layers as matrices: how weights, inputs and output gradients of each kind of layer line up.

Every layer that is linear in its weights computes, at each of T positions of an example, a matrix times a vector of
features. Its weight is then a stack of matrices, one for each group of channels, and the gradient of one example is a
sum of outer products over the positions:

    y_t = W a_t + b          ∇_W = Σ_t g_t a_tᵀ          ∇_b = Σ_t g_t

    Linear           features are the inputs; the positions are all dimensions between the first and the last
    Conv1D           of GPT-2: the same with the weight transposed
    Conv1d-3d        features are patches of the padded input
    ConvTranspose    features are patches of the input spread out by the stride, with the kernel flipped
    Embedding        features are one-hot: W is the transposed table

A normalisation layer multiplies elementwise, and has the gradient Σ_t g_t x̂_t instead. `LAYERS` and `SCALES` are open:
enter the class of a layer that behaves like one of these.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bayeslim.curvature.patches import patch_order, patches
from bayeslim.posteriors.layer_matrix import LayerMatrix


class MatrixLayer:
    """A layer seen as matrices: `Linear`, and the base of the others."""

    inputs_first = False

    def __init__(self, module: Any):
        self.module = module
        shape, groups = tuple(module.weight.shape), getattr(module, "groups", 1)
        self.layer = LayerMatrix("weight", None, shape, groups, self.inputs_first)
        self.groups, self.rows, self.columns = self.layer.size

    def weight(self, matrix: Tensor) -> Tensor:
        """Turn matrices (groups, rows, columns), in the features' order, into a weight."""
        matrix = matrix if self.order is None else matrix[..., self.order]
        return self.layer.params(matrix)["weight"]

    def locate(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Find the output and feature of weights given by flat indices, over all groups."""
        numbers = torch.arange(self.module.weight.numel(), device=index.device)
        place = numbers.scatter(0, self.layer.matrix({"weight": numbers.view(self.layer.shape)}).flatten(), numbers)
        row, column = place[index] // self.columns, place[index] % self.columns
        column = column if self.order is None else self.order[column]
        return row, row // self.rows * self.columns + column

    def batched(self, x: Tensor) -> bool:
        """Whether an input has a batch dimension."""
        return x.ndim > 1

    def features(self, x: Tensor, output_shape: torch.Size) -> Tensor:
        """Compute the features (B, T, groups, columns), columns in the order of `order`."""
        return _by_position(x)

    def gradients(self, g: Tensor) -> Tensor:
        """Reshape gradients of the outputs, (B, ...), to (B, T, groups, rows)."""
        return _by_position(g)

    @cached_property
    def order(self) -> Tensor | None:
        """The feature of each column of the matrix; None where the order is the same."""
        return None

    def feature_bytes(self, x: Tensor, output_shape: torch.Size) -> int:
        """Count the bytes that the features of one example take."""
        positions = math.prod(output_shape) // max(1, output_shape[0] * self.rows * self.groups)
        return 4 * positions * self.columns * self.groups


class TransposedLinearLayer(MatrixLayer):
    """The `Conv1D` of GPT-2: a linear layer with a weight of inputs × outputs."""

    inputs_first = True


class ConvolutionLayer(MatrixLayer):
    """Conv1d, Conv2d, Conv3d, with any stride, padding, padding mode, dilation and groups."""

    def batched(self, x: Tensor) -> bool:
        """Whether an input has a batch dimension."""
        return bool(x.ndim == self.module.weight.ndim)

    def padded(self, x: Tensor) -> Tensor:
        """Pad the input, and give it a batch dimension if it has none."""
        x = x if self.batched(x) else x.unsqueeze(0)
        module = self.module
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padding = module._reversed_padding_repeated_twice
        return F.pad(x, padding, mode=mode) if any(padding) else x

    def features(self, x: Tensor, output_shape: torch.Size) -> Tensor:
        """Take patches of the padded input."""
        module = self.module
        return patches(self.padded(x), module.kernel_size, module.stride, module.dilation, module.groups)

    def gradients(self, g: Tensor) -> Tensor:
        """Put channels last and flatten positions."""
        g = g if g.ndim == self.module.weight.ndim else g.unsqueeze(0)
        positions = g.flatten(2).mT
        return positions.view(*positions.shape[:2], self.groups, self.rows)

    @cached_property
    def order(self) -> Tensor | None:
        """Patches have their channels last."""
        return self._order(flipped=False)

    def _order(self, flipped: bool) -> Tensor:
        kernel = self.module.kernel_size
        return patch_order(kernel, self.columns // math.prod(kernel), flipped, self.module.weight.device)


class TransposedConvolutionLayer(ConvolutionLayer):
    """ConvTranspose1d, ConvTranspose2d, ConvTranspose3d."""

    inputs_first = True

    def features(self, x: Tensor, output_shape: torch.Size) -> Tensor:
        """Take patches of the input with stride − 1 zeros between its pixels."""
        module, x = self.module, x if self.batched(x) else x.unsqueeze(0)
        spread = x.new_zeros(*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], module.stride, strict=True)))
        every: list[Any] = [slice(None, None, s) for s in module.stride]
        spread[(..., *every)] = x
        padding: list[int] = []
        for dim, (k, p, d) in enumerate(zip(module.kernel_size, module.padding, module.dilation, strict=True)):
            reach, n = d * (k - 1), output_shape[dim - len(module.kernel_size)]
            padding = [reach - p, n + p - spread.shape[2 + dim], *padding]
        once = (1,) * len(module.kernel_size)
        return patches(F.pad(spread, padding), module.kernel_size, once, module.dilation, module.groups)

    @cached_property
    def order(self) -> Tensor | None:
        """Patches have their channels last, and meet the kernel flipped."""
        return self._order(flipped=True)


class EmbeddingLayer(MatrixLayer):
    """Embedding: one-hot features, of which the padding index has none."""

    inputs_first = True

    def batched(self, x: Tensor) -> bool:
        """Whether an input has a batch dimension."""
        return x.ndim > 0

    def features(self, x: Tensor, output_shape: torch.Size) -> Tensor:
        """Make one-hot vectors."""
        weight = self.module.weight
        hot = F.one_hot(x.reshape(x.shape[0] if x.ndim else 1, -1, 1), weight.shape[0]).to(weight.dtype)
        if self.module.padding_idx is not None:
            hot[..., self.module.padding_idx] = 0
        return hot


class ScaleLayer:
    """A normalisation layer y = w ⊙ x̂ + b."""

    def __init__(self, module: Any):
        self.module = module
        self.trailing = isinstance(module, (nn.LayerNorm, nn.RMSNorm))

    def batched(self, x: Tensor) -> bool:
        """Whether an input has a batch dimension."""
        return x.ndim > (self.module.weight.ndim if self.trailing else 1)

    def example_gradients(self, leaf: str, x: Tensor, g: Tensor) -> Tensor:
        """Compute each example's gradient of the weight or bias, (K, B, numel)."""
        if leaf == "weight":
            statistics = {name: b.to(x) for name, b in self.module.named_buffers() if b.is_floating_point()}
            plain = {
                name: torch.full_like(p, name == "weight", dtype=x.dtype) for name, p in self.module.named_parameters()
            }
            with torch.no_grad():
                g = g * functional_call(self.module, statistics | plain, (x,))
        keep = g.shape[-self.module.weight.ndim :] if self.trailing else (g.shape[2], g[0, 0, 0].numel())
        g = g.reshape(*g.shape[:2], -1, *keep)
        return g.sum(2).flatten(2) if self.trailing else g.sum((2, 4))


def _by_position(x: Tensor) -> Tensor:
    """Reshape (B, ..., D), also of no examples, or (D,) to (B, T, 1, D)."""
    return x.reshape(x.shape[0] if x.ndim > 1 else 1, math.prod(x.shape[1:-1]), 1, x.shape[-1])


LAYERS: dict[type[nn.Module], type[MatrixLayer]] = {
    nn.Linear: MatrixLayer,
    nn.Conv1d: ConvolutionLayer,
    nn.Conv2d: ConvolutionLayer,
    nn.Conv3d: ConvolutionLayer,
    nn.ConvTranspose1d: TransposedConvolutionLayer,
    nn.ConvTranspose2d: TransposedConvolutionLayer,
    nn.ConvTranspose3d: TransposedConvolutionLayer,
    nn.Embedding: EmbeddingLayer,
}
"""Layers that are linear in their weights; a class with the same mathematics may be added."""

SCALES: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.RMSNorm,
)
"""Normalisation layers with an elementwise weight."""


def matrix_layer(module: nn.Module) -> MatrixLayer | None:
    """View a module as matrices; None where its forward may be anything."""
    for kind, view in LAYERS.items():
        if isinstance(module, kind) and _plain(module, kind) and "weight" in module._parameters:
            if isinstance(module, nn.Embedding) and module.max_norm is not None:
                return None  # it rescales its own weights in every forward
            return view(module)
    if is_transposed_linear(module):
        return TransposedLinearLayer(module)
    is_linear = _is_class(module, "FalconLinear", "transformers.models.falcon.modeling_falcon")
    return MatrixLayer(module) if is_linear else None


def is_transposed_linear(module: nn.Module) -> bool:
    """Check whether a module is the `Conv1D` of Hugging Face's GPT-2."""
    return _is_class(module, "Conv1D", "transformers.pytorch_utils")


def _is_class(module: nn.Module, name: str, path: str) -> bool:
    """Check for a class of a library that may not be installed."""
    return type(module).__name__ == name and type(module).__module__ == path


def scale_layer(module: nn.Module) -> ScaleLayer | None:
    """View a module as an elementwise scale; None where it is none."""
    for kind in SCALES:
        if isinstance(module, kind) and _plain(module, kind) and module._parameters.get("weight") is not None:
            return ScaleLayer(module)
    return None


def _plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Check that a module runs the forward of this class, and not another one."""
    return type(module).forward is kind.forward and "forward" not in module.__dict__
