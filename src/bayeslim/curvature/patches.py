"""Patches of a convolution's input, which its weights multiply, and their second moment.

A convolution is a linear layer applied at every output position to a patch of the input (im2col). In channels-last
memory the patches are one strided view, copied in long runs.

The second moment Σ p pᵀ of overlapping patches multiplies the same pairs of pixels again and again. `RowMoment`
multiplies each pair of image rows within a kernel's height once, and adds up the patches' moment from those at the
end: for a 5 × 5 kernel on small images several times less arithmetic, and no im2col at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

MAX_ROW_MOMENT_NUMBERS = 2**24
"""Numbers that a `RowMoment` may hold."""


def patches(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    """Take the patches of padded images (B, C, *spatial).

    They are (B, positions, groups, kernel × C/groups). Channels vary fastest within a patch; `patch_order` gives the
    weights' order.
    """
    x = x.movedim(1, -1).contiguous()
    batch, *spatial, channels = x.shape
    out = output_size(spatial, kernel, stride, dilation)
    strides = x.stride()
    size = (batch, *out, groups, *kernel, channels // groups)
    steps = (
        strides[0],
        *(s * by for s, by in zip(strides[1:-1], stride, strict=True)),
        channels // groups * strides[-1],
        *(s * by for s, by in zip(strides[1:-1], dilation, strict=True)),
        strides[-1],
    )
    return x.as_strided(size, steps).reshape(batch, math.prod(out), groups, math.prod(kernel) * channels // groups)


def patch_order(kernel: Sequence[int], channels: int, flipped: bool, device: torch.device) -> Tensor:
    """Find each weight of a row (channel, *kernel) in a patch (*kernel, channel)."""
    places = torch.arange(math.prod(kernel) * channels, device=device).view(*kernel, channels)
    if flipped:
        places = places.flip(tuple(range(len(kernel))))
    return places.movedim(-1, 0).flatten()


def output_size(
    spatial: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Count the positions of a kernel in a padded image, by dimension."""
    return [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(spatial, kernel, stride, dilation, strict=True)]


class RowMoment:
    """The second moment of all patches of two-dimensional images, from products of image rows.

    Args:
        size: channels, height and width of the padded images.
        kernel: height and width.
        stride: likewise.
        dilation: likewise.
        dtype: to accumulate in.
        device: of the images.
    """

    def __init__(
        self,
        size: tuple[int, int, int],
        kernel: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.size, self.kernel, self.stride, self.dilation = size, tuple(kernel), tuple(stride), tuple(dilation)
        channels, height, width = size
        self.span = dilation[0] * (kernel[0] - 1) + 1
        row = width * channels
        self.products = torch.zeros(height, row, self.span * row, dtype=dtype, device=device)
        self.sum = torch.zeros(height, width, channels, dtype=dtype, device=device)

    @staticmethod
    def pays(size: tuple[int, int, int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> bool:
        """Decide whether it saves much arithmetic over im2col, in bounded memory."""
        channels, height, width = size
        span = dilation[0] * (kernel[0] - 1) + 1
        by_rows = height * span * (width * channels) ** 2
        out = output_size((height, width), kernel, stride, dilation)
        by_patches = math.prod(out) * (channels * math.prod(kernel)) ** 2
        return by_rows <= MAX_ROW_MOMENT_NUMBERS and 1.5 * by_rows < by_patches

    def add(self, x: Tensor) -> None:
        """Add a batch of padded images, (B, C, H, W)."""
        x = x.movedim(1, -1).to(self.products.dtype).contiguous()
        batch, height = x.shape[:2]
        self.sum += x.sum(0)
        for y in range(height):
            below = x[:, y : y + self.span].reshape(batch, -1)
            self.products[y, :, : below.shape[1]].addmm_(x[:, y].reshape(batch, -1).T, below)

    def result(self) -> tuple[Tensor, Tensor]:
        """Compute the second moment (I, I) and the sum (I,) of patches, in their order."""
        channels, height, width = self.size
        (kh, kw), (sh, sw), (dh, dw) = self.kernel, self.stride, self.dilation
        oh, ow = output_size((height, width), self.kernel, self.stride, self.dilation)
        products = self.products.view(height, width, channels, self.span, width, channels)

        def rows(i: int) -> slice:
            return slice(i * dh, i * dh + sh * (oh - 1) + 1, sh)

        def columns(j: int) -> slice:
            return slice(j * dw, j * dw + sw * (ow - 1) + 1, sw)

        moment = self.products.new_zeros(kh, kw, channels, kh, kw, channels)
        for i, below in product(range(kh), range(kh)):
            if below < i:
                continue
            pair = products[rows(i), :, :, (below - i) * dh].sum(0)  # (width, channels, width, channels)
            for j, k in product(range(kw), range(kw)):
                block = pair[columns(j)][:, :, columns(k)].diagonal(dim1=0, dim2=2).sum(-1)
                moment[i, j, :, below, k] = block
                moment[below, k, :, i, j] = block.T
        total = torch.stack([self.sum[rows(i), columns(j)].sum((0, 1)) for i, j in product(range(kh), range(kw))])
        features = kh * kw * channels
        return moment.reshape(features, features), total.reshape(features)
