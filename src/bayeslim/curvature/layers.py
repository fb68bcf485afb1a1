"""Layers as matrices: how weights, inputs and output gradients of each kind of layer line up.

Every layer that is linear in its weights computes, at each of T positions of an example, a matrix times a vector of
features. Its weight is then a stack of matrices, one for each group of channels, and the gradient of one example is a
sum of outer products over the positions:

    y_t = W a_t + b          ∇_W = Σ_t g_t a_tᵀ          ∇_b = Σ_t g_t

    Linear           features are the inputs; the positions are all dimensions between the first and the last
    Conv1d-3d        features are patches of the padded input
    ConvTranspose    features are patches of the input spread out by the stride, with the kernel flipped
    Embedding        features are one-hot: W is the transposed table

A normalisation layer multiplies elementwise, and has the gradient Σ_t g_t x̂_t instead. `LAYERS` and `SCALES` are open:
enter the class of a layer that behaves like one of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bayeslim.curvature.patches import patch_order, patches


@dataclass(frozen=True)
class Layout:
    """How a weight is a stack of matrices.

    Attributes:
        shape: of the weight.
        groups: how many matrices.
        inputs_first: whether the weight has its input dimension first, as embeddings and transposed convolutions do.
    """

    shape: tuple[int, ...]
    groups: int = 1
    inputs_first: bool = False

    @property
    def rows(self) -> int:
        """Outputs of one group."""
        return self.shape[1] if self.inputs_first else self.shape[0] // self.groups

    @property
    def columns(self) -> int:
        """Inputs of one group, kernel positions counted."""
        inputs = self.shape[0] // self.groups if self.inputs_first else self.shape[1]
        return inputs * math.prod(self.shape[2:])

    def to_matrix(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The weight as (groups, rows, columns), with the bias as one more column where given."""
        if self.inputs_first:
            weight = weight.reshape(self.groups, self.shape[0] // self.groups, self.rows, -1).transpose(1, 2)
        matrix = weight.reshape(self.groups, self.rows, self.columns)
        return matrix if bias is None else torch.cat([matrix, bias.reshape(self.groups, self.rows, 1)], -1)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight, and bias where the matrix has its column; the inverse of `to_matrix`."""
        bias = matrix[..., self.columns].reshape(-1) if matrix.shape[-1] > self.columns else None
        weight = matrix[..., : self.columns]
        if self.inputs_first:
            kernel = math.prod(self.shape[2:])
            weight = weight.reshape(self.groups, self.rows, -1, kernel).transpose(1, 2)
        return weight.reshape(self.shape), bias

    def locate(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Group, row and column of weights given by their flat indices."""
        places = self.to_matrix(torch.arange(math.prod(self.shape), device=index.device).view(self.shape)).flatten()
        at = torch.empty_like(places).scatter_(0, places, torch.arange(len(places), device=index.device))[index]
        return at // (self.rows * self.columns), at // self.columns % self.rows, at % self.columns


class MatrixLayer:
    """A layer seen as matrices: `Linear`, and the base of the others.

    Args:
        module: the user's layer.
    """

    def __init__(self, module: Any):
        self.module = module
        self.layout = self.make_layout()

    def make_layout(self) -> Layout:
        """How the weight is a matrix."""
        return Layout(tuple(self.module.weight.shape))

    def batched(self, x: Tensor) -> bool:
        """Whether an input has a batch dimension."""
        return x.ndim > 1

    def features(self, x: Tensor, output_shape: torch.Size) -> Tensor:
        """What the weights are multiplied with, (B, T, groups, columns), columns in the order of `order`."""
        return x.reshape(x.shape[0] if x.ndim > 1 else 1, -1, 1, x.shape[-1])

    def gradients(self, g: Tensor) -> Tensor:
        """Gradients of the outputs, (B, ...), as (B, T, groups, rows)."""
        return g.reshape(g.shape[0] if g.ndim > 1 else 1, -1, 1, g.shape[-1])

    @property
    def order(self) -> Tensor | None:
        """Where each column of the matrix has its feature; None where the order is the same."""
        return None

    def feature_bytes(self, x: Tensor, output_shape: torch.Size) -> int:
        """Memory that the features of one example take."""
        positions = math.prod(output_shape) // max(1, output_shape[0] * self.layout.rows * self.layout.groups)
        return 4 * positions * self.layout.columns * self.layout.groups


class ConvolutionLayer(MatrixLayer):
    """Conv1d, Conv2d, Conv3d, with any stride, padding, padding mode, dilation and groups."""

    def make_layout(self) -> Layout:
        """Outputs first, a matrix for each group."""
        return Layout(tuple(self.module.weight.shape), self.module.groups)

    def batched(self, x: Tensor) -> bool:
        """Whether an input has a batch dimension."""
        return bool(x.ndim == self.module.weight.ndim)

    def padded(self, x: Tensor) -> Tensor:
        """The input with its padding, batched."""
        x = x if self.batched(x) else x.unsqueeze(0)
        module = self.module
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padding = module._reversed_padding_repeated_twice
        return F.pad(x, padding, mode=mode) if any(padding) else x

    def features(self, x: Tensor, output_shape: torch.Size) -> Tensor:
        """Patches of the padded input."""
        module = self.module
        return patches(self.padded(x), module.kernel_size, module.stride, module.dilation, module.groups)

    def gradients(self, g: Tensor) -> Tensor:
        """Channels last, positions flattened."""
        g = g if g.ndim == self.module.weight.ndim else g.unsqueeze(0)
        return g.movedim(1, -1).reshape(g.shape[0], -1, self.layout.groups, self.layout.rows)

    @property
    def order(self) -> Tensor | None:
        """Patches have their channels last."""
        return self._order(flipped=False)

    def _order(self, flipped: bool) -> Tensor:
        kernel = self.module.kernel_size
        return patch_order(kernel, self.layout.columns // math.prod(kernel), flipped, self.module.weight.device)


class TransposedConvolutionLayer(ConvolutionLayer):
    """ConvTranspose1d, ConvTranspose2d, ConvTranspose3d."""

    def make_layout(self) -> Layout:
        """Inputs first, a matrix for each group."""
        return Layout(tuple(self.module.weight.shape), self.module.groups, inputs_first=True)

    def features(self, x: Tensor, output_shape: torch.Size) -> Tensor:
        """Patches of the input with stride − 1 zeros between its pixels."""
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

    @property
    def order(self) -> Tensor | None:
        """Patches have their channels last, and meet the kernel flipped."""
        return self._order(flipped=True)


class EmbeddingLayer(MatrixLayer):
    """Embedding: one-hot features, of which the padding index has none."""

    def make_layout(self) -> Layout:
        """The table has its inputs first."""
        return Layout(tuple(self.module.weight.shape), inputs_first=True)

    def batched(self, x: Tensor) -> bool:
        """Whether an input has a batch dimension."""
        return x.ndim > 0

    def features(self, x: Tensor, output_shape: torch.Size) -> Tensor:
        """One-hot vectors."""
        weight = self.module.weight
        hot = F.one_hot(x.reshape(x.shape[0] if x.ndim else 1, -1, 1), weight.shape[0]).to(weight.dtype)
        if self.module.padding_idx is not None:
            hot[..., self.module.padding_idx] = 0
        return hot


class ScaleLayer:
    """A normalisation layer y = w ⊙ x̂ + b.

    Args:
        module: the user's layer.
    """

    def __init__(self, module: Any):
        self.module = module
        self.trailing = isinstance(module, (nn.LayerNorm, nn.RMSNorm))

    def batched(self, x: Tensor) -> bool:
        """Whether an input has a batch dimension."""
        return x.ndim > (self.module.weight.ndim if self.trailing else 1)

    def example_gradients(self, leaf: str, x: Tensor, g: Tensor) -> Tensor:
        """Gradients of the weight or the bias for each example, (K, B, numel), from gradients (K, B, ...)."""
        if leaf == "weight":
            plain = {
                name: torch.full_like(p, name == "weight")
                for name, p in self.module._parameters.items()
                if p is not None
            }
            with torch.no_grad():
                g = g * functional_call(self.module, plain, (x,))
        keep = g.shape[-self.module.weight.ndim :] if self.trailing else (g.shape[2], g[0, 0, 0].numel())
        g = g.reshape(*g.shape[:2], -1, *keep)
        return g.sum(2).flatten(2) if self.trailing else g.sum((2, 4))


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
    """The view of a module as matrices, or None where its forward may be anything."""
    for kind, view in LAYERS.items():
        if isinstance(module, kind) and _plain(module, kind) and "weight" in module._parameters:
            if isinstance(module, nn.Embedding) and module.max_norm is not None:
                return None  # it rescales its own weights in every forward
            return view(module)
    return None


def scale_layer(module: nn.Module) -> ScaleLayer | None:
    """The view of a module as an elementwise scale, or None."""
    for kind in SCALES:
        if isinstance(module, kind) and _plain(module, kind) and module._parameters.get("weight") is not None:
            return ScaleLayer(module)
    return None


def _plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what its class promises: no forward of a subclass, none set on the instance."""
    return type(module).forward is kind.forward and "forward" not in module.__dict__
