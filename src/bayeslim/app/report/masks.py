"""The masks of the first layers as images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.images import bitmap, shade, shrunk
from bayeslim.app.report.quantities import number, percent, shape
from bayeslim.bayesian import Bayesian
from bayeslim.sites import is_weight, owner
from bayeslim.types import Inputs

MAX_LAYERS_SHOWN = 3
_MAX_SIDE_PIXELS = 460
_MAX_BARS = 40


def draw_masks(pruned: Bayesian, example: Inputs) -> list[Figure]:
    """Draw the masks of the first layers that lost weights.

    If the example holds images of the size of a first linear layer, its mask is also shown as an image.
    """
    names = [
        name
        for name, p in pruned.model.named_parameters()
        if name in pruned.masks and is_weight(name, p, owner(pruned.model, name)[0])
    ]
    figures = []
    for place, name in enumerate(names[:MAX_LAYERS_SHOWN]):
        mask = pruned.masks[name].cpu()
        image = _input_image(mask, example) if place == 0 else None
        figures.append(_figure(name, mask, image))
    return figures


def _figure(name: str, mask: Tensor, inputs: Tensor | None) -> Figure:
    kept = int(mask.sum())
    picture, axes = laid_out(mask)
    title = f"Mask of {name}"
    description = f"{number(kept)} of {number(mask.numel())} weights are left, {percent(kept / mask.numel())}. {axes}"
    parts = [bitmap(shade(shrunk(picture, _MAX_SIDE_PIXELS)), description, axes, "mask")]
    caption = f"{percent(kept / mask.numel())} of {shape(tuple(mask.shape))} weights are left, in colour."
    if inputs is not None:
        words = "Number of weights left that read each input pixel."
        parts.append(bitmap(shade(inputs / inputs.max().clamp_min(1e-12)), words, "by input pixel", "mask pixels"))
        caption += " Beside it, the number of weights left that read each input pixel."
    return Figure(title, caption, f'<div class="bitmaps">{"".join(parts)}</div>', _table(mask))


def laid_out(mask: Tensor) -> tuple[Tensor, str]:
    """Convert a mask of any dimension to a matrix of 0 and 1; also name its axes.

    >>> laid_out(torch.ones(6, 2))[0].shape
    torch.Size([2, 6])
    """
    values = mask.float()
    if values.ndim == 1:
        return values[None], "one column an entry"
    if values.ndim == 2:
        if values.shape[0] > values.shape[1]:
            return values.T, "columns: outputs, rows: inputs"
        return values, "columns: inputs, rows: outputs"
    kernels = values.flatten(2) if values.ndim == 3 else values.flatten(2, -2).flatten(3)
    kernels = kernels.unsqueeze(2) if kernels.ndim == 3 else kernels
    outputs, inputs, rows, columns = kernels.shape
    if inputs <= 4:
        tiles = kernels.flatten(0, 1)
        across = max(1, min(len(tiles), math.ceil(math.sqrt(2 * len(tiles) * rows / columns))))
        down = math.ceil(len(tiles) / across)
        padded = torch.zeros(across * down, rows, columns)
        padded[: len(tiles)] = tiles
        return _tiled(padded.view(down, across, rows, columns)), "one tile a kernel"
    if outputs > inputs:
        return _tiled(kernels.transpose(0, 1)), "columns: output channels, rows: input channels, one tile a kernel"
    return _tiled(kernels), "columns: input channels, rows: output channels, one tile a kernel"


def _tiled(tiles: Tensor) -> Tensor:
    """Join tiles (R, C, h, w) into one image, with gaps unless they are pixels."""
    gap = 1 if tiles.shape[2] * tiles.shape[3] > 1 else 0
    framed = torch.nn.functional.pad(tiles, (0, gap, 0, gap))
    return framed.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)


def _input_image(mask: Tensor, example: Inputs) -> Tensor | None:
    """Count the weights that read each pixel; None without images or differences."""
    if not isinstance(example, Tensor) or example.ndim != 4 or mask.ndim != 2:
        return None
    sizes = tuple(example.shape[1:])
    if mask.shape[1] != math.prod(sizes):
        return None
    readers = mask.float().sum(0).view(sizes).sum(0)
    return None if bool((readers == readers[0, 0]).all()) else readers


def _table(mask: Tensor) -> Table:
    """Count the remaining weights of each output, or of groups of neighbours."""
    left = mask.flatten(1).sum(1) if mask.ndim > 1 else mask.long()
    each = mask[0].numel() if mask.ndim > 1 else 1
    groups: Sequence[Tensor] = torch.arange(len(left)).tensor_split(min(_MAX_BARS, len(left)))
    rows = []
    for group in groups:
        first, last = int(group[0]), int(group[-1])
        name = str(first) if first == last else f"{first} to {last}"
        rows.append((name, number(len(group) * each), number(int(left[group].sum()))))
    return Table.of(("outputs", "weights", "left"), rows)
