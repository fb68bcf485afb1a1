"""How the weight and bias of a layer become one matrix V = [W, b] of outputs × inputs, and back.

A layer linear in its parameters computes y = V ã, with ã its input (for a convolution: an input patch) followed by a 1
for the bias. Groups of a grouped convolution are independent matrices, so V is (groups, outputs, inputs).

| layer | weight | inputs are ordered by |
|---|---|---|
| Linear | (O, I) | feature |
| Conv | (O, I / groups, *kernel) | channel, then kernel position |
| ConvTranspose (`transposed`) | (I, O / groups, *kernel) | channel, then kernel position |
| Embedding (`transposed`) | (vocabulary, O) | word |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslim.types import Params


@dataclass(frozen=True)
class LayerMatrix:
    """The layout of one layer.

    Attributes:
        weight: name of its weight.
        bias: name of its bias, the last input column; None if it has none, or if that is not random.
        shape: the weight's shape.
        groups: groups of the convolution.
        transposed: whether the weight has inputs before outputs.
    """

    weight: str
    bias: str | None
    shape: tuple[int, ...]
    groups: int = 1
    transposed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Its parameters."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def size(self) -> tuple[int, int, int]:
        """(groups, outputs, inputs) of V, a bias column included."""
        first, *rest = self.shape
        outputs = rest[0] if self.transposed else first // self.groups
        count = 1
        for n in self.shape:
            count *= n
        return self.groups, outputs, count // (self.groups * outputs) + (self.bias is not None)

    def matrix(self, params: Mapping[str, Tensor]) -> Tensor:
        """Make V, (..., groups, outputs, inputs), from the layer's parameters."""
        weight = params[self.weight]
        lead = weight.shape[: weight.ndim - len(self.shape)]
        groups, outputs, _ = self.size
        if self.transposed:
            inputs = self.shape[0] // groups
            weight = weight.reshape(*lead, groups, inputs, outputs, -1).transpose(-3, -2)
        matrix = weight.reshape(*lead, groups, outputs, -1)
        if self.bias is None:
            return matrix
        return torch.cat([matrix, params[self.bias].reshape(*lead, groups, outputs, 1)], -1)

    def params(self, matrix: Tensor) -> Params:
        """Split V into the layer's parameters."""
        lead = matrix.shape[:-3]
        groups, outputs, _ = self.size
        weight = matrix if self.bias is None else matrix[..., :-1]
        if self.transposed:
            weight = weight.reshape(*lead, groups, outputs, self.shape[0] // groups, -1).transpose(-3, -2)
        params = {self.weight: weight.reshape(*lead, *self.shape)}
        if self.bias is not None:
            params[self.bias] = matrix[..., -1].reshape(*lead, groups * outputs)
        return params
