"""Sums of outer products: the second moments that Kronecker factors are made of."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bayeslim.curvature.layers import ConvolutionLayer, EmbeddingLayer, MatrixLayer, TransposedConvolutionLayer
from bayeslim.curvature.padding import without_padding
from bayeslim.curvature.patches import RowMoment
from bayeslim.curvature.sweep import examples_at_once

MIN_ROWS_FOR_STRIPS = 128
"""From this many rows on, computing half of a product saves more than several smaller products cost."""

ROWS_PER_STRIP = 128
"""Rows of a product that are computed at a time, where only the upper triangle is wanted."""


def add_outer_products(total: Tensor, rows: Tensor) -> None:
    """Add Σ_n r_n r_nᵀ of rows (n, groups, D) to `total` (groups, D, D) in place.

    Only the upper triangle counts, see `symmetric`: on a CPU about half of the product is computed, in strips.
    """
    if total.shape[0] > 1:
        grouped = rows.transpose(0, 1)
        total.baddbmm_(grouped.mT, grouped)
        return
    flat = rows.reshape(-1, rows.shape[-1])
    if flat.device.type != "cpu" or len(flat) < MIN_ROWS_FOR_STRIPS:
        total[0].addmm_(flat.T, flat)
    else:
        for start in range(0, flat.shape[1], ROWS_PER_STRIP):
            stop = start + ROWS_PER_STRIP
            total[0, start:stop, start:].addmm_(flat[:, start:stop].T, flat[:, start:])


def symmetric(total: Tensor) -> Tensor:
    """Complete sums made by `add_outer_products` from their upper triangles."""
    return total.triu() + total.triu(1).mT


class InputMoment:
    """The second moment of a layer's features, with a constant 1 as the last one where there is a bias.

    The constant is never appended to the data: its products are the features' sum and their count.
    """

    def __init__(self, view: MatrixLayer, bias: bool, dtype: torch.dtype, diagonal: bool = False):
        device = view.module.weight.device
        self.view, self.bias = view, bias
        self.diagonal = diagonal or isinstance(view, EmbeddingLayer)
        size = (view.groups, view.columns)
        self.outer = torch.zeros(size if self.diagonal else (*size, view.columns), dtype=dtype, device=device)
        self.total = torch.zeros(size, dtype=dtype, device=device)
        self.count = torch.zeros((), dtype=torch.float64)
        self._rows: RowMoment | None = None

    def add(self, x: Tensor, output_shape: torch.Size, real: Tensor | None = None) -> None:
        """Add the features at every position of a layer's input.

        Of a linear layer's input, only the `real` positions count if they are given.
        """
        view = self.view
        if real is not None and not isinstance(view, (ConvolutionLayer, EmbeddingLayer)):
            x = without_padding(x, real)
            output_shape = torch.Size((*x.shape[:-1], *output_shape[-1:]))
        if isinstance(view, EmbeddingLayer):
            indices = x.flatten()
            self.count += len(indices)
            if view.module.padding_idx is not None:
                indices = indices[indices != view.module.padding_idx]
            self.outer[0] += torch.bincount(indices, minlength=view.columns)
        elif self._by_rows(x):
            assert isinstance(view, ConvolutionLayer)
            assert self._rows is not None
            padded = view.padded(x)
            self._rows.add(padded)
            self.count += padded.shape[0] * output_shape[-1] * output_shape[-2]
        else:
            for features in self._features(x, output_shape):
                self.add_rows(features.flatten(0, 1))

    def add_rows(self, features: Tensor) -> None:
        """Add features (n, groups, I) as they are."""
        rows = features.to(self.total.dtype)
        self.count += rows.shape[0]
        if self.diagonal:
            self.outer += rows.square().sum(0)
            return
        add_outer_products(self.outer, rows)
        if self.bias:
            self.total += rows.sum(0)

    def total_over_positions(
        self, x: Tensor, output_shape: torch.Size, real: Tensor | None = None
    ) -> tuple[int | Tensor, Tensor]:
        """Count the positions and sum each example's features over them, (B, groups, I).

        Of a linear layer's input, only the `real` positions count if they are given.
        """
        positions: int | Tensor | None = None
        is_linear = not isinstance(self.view, (ConvolutionLayer, EmbeddingLayer))
        if real is not None and is_linear and x.shape[:-1] == real.shape:
            x, positions = x * real[..., None], real.sum(1).clamp(min=1)[:, None, None]
        sums = []
        for features in self._features(x, output_shape):
            sums.append(features.to(self.total.dtype).sum(1))
        return features.shape[1] if positions is None else positions, torch.cat(sums)

    def _features(self, x: Tensor, output_shape: torch.Size) -> Iterator[Tensor]:
        """Yield the features of a few examples at a time, (b, T, groups, I)."""
        view = self.view
        if not view.batched(x):
            x, output_shape = x.unsqueeze(0), torch.Size((1, *output_shape))
        for some in x.split(examples_at_once(view.feature_bytes(x, output_shape), x.device)):
            yield view.features(some, output_shape)

    def tensors(self) -> tuple[Tensor, ...]:
        """List all tensors to be added over processes."""
        self._flush()
        return self.outer, self.total, self.count

    def mean(self) -> Tensor:
        """Average to the second moment or its diagonal, in the weights' order."""
        self._flush()
        count = self.count.to(self.outer.device, self.outer.dtype)
        order = self.view.order
        if self.diagonal:
            squares = (self.outer if order is None else self.outer[:, order]) / count
            return torch.cat([squares, torch.ones_like(squares[:, :1])], 1) if self.bias else squares
        outer, total = symmetric(self.outer), self.total
        if order is not None:
            outer, total = outer[:, order][:, :, order], total[:, order]
        if self.bias:
            corner = count.expand(total.shape[0], 1, 1)
            outer = torch.cat(
                [torch.cat([outer, total.unsqueeze(2)], 2), torch.cat([total.unsqueeze(1), corner], 2)], 1
            )
        return outer / count

    def _by_rows(self, x: Tensor) -> bool:
        """Decide whether these images go through `RowMoment`, and make one of their size."""
        view = self.view
        if self.diagonal or not isinstance(view.module, nn.Conv2d) or isinstance(view, TransposedConvolutionLayer):
            return False
        module = view.module
        assert isinstance(view, ConvolutionLayer)
        left, right, top, bottom = module._reversed_padding_repeated_twice
        size = (module.in_channels, x.shape[-2] + top + bottom, x.shape[-1] + left + right)
        if module.groups > 1 or not RowMoment.pays(size, module.kernel_size, module.stride, module.dilation):
            return False
        if self._rows is None or self._rows.size != size:
            self._flush()
            dtype, device = self.outer.dtype, self.outer.device
            self._rows = RowMoment(size, module.kernel_size, module.stride, module.dilation, dtype, device)
        return True

    def _flush(self) -> None:
        if self._rows is not None:
            outer, total = self._rows.result()
            self.outer[0] += outer
            self.total[0] += total
            self._rows = None
