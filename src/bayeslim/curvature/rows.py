"""Rows of the curvature: chosen entries of single examples' gradients, as a matrix.

For a layer y_t = W a_t the gradient of one example at W[o, i] is Σ_t g_t[o] a_t[i]: only the chosen entries are formed,
and of a few examples at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bayeslim.curvature.example_gradients import Backward, ExampleGradients
from bayeslim.curvature.layers import MatrixLayer, ScaleLayer
from bayeslim.curvature.sweep import examples, examples_at_once
from bayeslim.types import Params, flattened


class GradientRows:
    """Gradients of single examples at `weights`: flat indices by name, None for all of a parameter."""

    def __init__(self, gradients: ExampleGradients, weights: Mapping[str, Tensor | None], dtype: torch.dtype):
        params = dict(gradients.model.named_parameters())
        self.gradients, self.weights, self.dtype = gradients, weights, dtype
        self.numel = {name: params[name].numel() for name in weights}
        self.sizes = {name: self.numel[name] if index is None else len(index) for name, index in weights.items()}
        self._entries: dict[str, Entries] = {}

    def __call__(self, backward: Backward) -> Iterator[tuple[int, Tensor]]:
        """Yield rows (K, b, S) of a few examples, and the index of their first example."""
        columns, device = backward.columns.shape[0], backward.columns.device
        numbers = sum(self.sizes.values()) + max(self._scratch(backward, name) for name in self.weights)
        step = examples_at_once(columns * self.dtype.itemsize * numbers, device)
        for start in range(0, backward.examples, step):
            stop = min(start + step, backward.examples)
            yield start, torch.cat(list(self._parts(backward, start, stop)), -1)

    def _parts(self, backward: Backward, start: int, stop: int) -> Iterator[Tensor]:
        """Yield the rows of one parameter after another."""
        columns = backward.columns[:, start:stop]
        whole: Params = {}
        if self.gradients.whole is not None:
            some = examples(backward.inputs, start, stop, backward.examples)
            whole = self.gradients.whole.gradients(some, columns)
        prepared: dict[str, tuple[Tensor, Tensor] | None] = {}
        for name, index in self.weights.items():
            part: Tensor | None
            if name in whole:
                yield _pick(flattened(whole[name], 2).to(self.dtype), index)
                continue
            path, leaf = self.gradients.direct[name]
            layer = backward.layers[path]
            if isinstance(layer.view, ScaleLayer):
                part = layer.scales(leaf, start, stop, self.dtype)
                part = None if part is None else _pick(part, index)
            else:
                if path not in prepared:
                    prepared[path] = layer.matrices(start, stop, self.dtype)
                part = self._matrix_part(name, layer.view, leaf, prepared[path])
            yield columns.new_zeros(*columns.shape[:2], self.sizes[name], dtype=self.dtype) if part is None else part

    def _matrix_part(
        self, name: str, view: MatrixLayer, leaf: str, matrices: tuple[Tensor, Tensor] | None
    ) -> Tensor | None:
        if matrices is None:
            return None
        if leaf == "bias":
            return _pick(matrices[1].sum(2).flatten(2), self.weights[name])
        if name not in self._entries:
            self._entries[name] = Entries(view, self.weights[name])
        return self._entries[name].of(*matrices)

    def _scratch(self, backward: Backward, name: str) -> int:
        """Estimate how many numbers a column of one example needs besides the result."""
        if name not in self.gradients.direct:
            return self.numel[name]
        layer = backward.layers[self.gradients.direct[name][0]]
        if not isinstance(layer.view, MatrixLayer):
            return max((x[0].numel() for x, _, _ in layer.calls), default=0)
        features = max((layer.view.feature_bytes(x, shape) // 4 for x, shape, _ in layer.calls), default=0)
        shared = features > layer.view.columns * layer.view.groups
        return features + (self.numel[name] if shared or self.weights[name] is None else 0)


class Entries:
    """Places of chosen weights among a layer's outputs and features, for one pass."""

    def __init__(self, view: MatrixLayer, index: Tensor | None):
        weight = view.module.weight
        chosen = torch.arange(weight.numel(), device=weight.device) if index is None else index
        self.outputs, self.inputs = view.locate(chosen)
        self.used_outputs, self.at_output = self.outputs.unique(return_inverse=True)
        self.used_inputs, self.at_input = self.inputs.unique(return_inverse=True)
        self.whole = index is None and view.groups == 1 and view.order is None and not view.inputs_first

    def of(self, a: Tensor, g: Tensor) -> Tensor:
        """Compute entries of Σ_t g_t a_tᵀ, (K, b, S).

        Args:
            a: features, (b, T, groups, I).
            g: output gradients, (K, b, T, groups, O).
        """
        a, g = a.flatten(2), g.flatten(3)
        if self.whole:
            return torch.einsum("bti,kbto->kboi", a, g).flatten(2)
        if a.shape[1] == 1:
            return g[:, :, 0, self.outputs] * a[:, 0, self.inputs]
        # one product over the positions for the rows and columns that occur, then the entries
        block = torch.einsum("bti,kbto->kboi", a[..., self.used_inputs], g[..., self.used_outputs])
        return block[:, :, self.at_output, self.at_input]


def _pick(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values[..., index]
