"""Small bitmaps inside the page: PNG as a data URL."""

from __future__ import annotations

import base64
import struct
import zlib
from html import escape

import numpy as np
import torch
from torch import Tensor

INK = (45, 130, 195)
"""A blue that is visible on white and on black."""


def png(pixels: Tensor) -> str:
    """Encode a bitmap (H, W, 4) of red, green, blue and opacity, uint8, as a data URL."""
    height, width, channels = pixels.shape
    if channels != 4 or pixels.dtype != torch.uint8:
        raise ValueError(f"A bitmap is (H, W, 4) of uint8. Got {tuple(pixels.shape)} of {pixels.dtype}.")
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.cpu().numpy().reshape(height, width * 4)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")
    data = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


def shade(values: Tensor) -> str:
    """Encode a matrix of opacities from 0 to 1 as a data URL."""
    pixels = torch.empty(*values.shape, 4, dtype=torch.uint8)
    pixels[..., :3] = torch.tensor(INK, dtype=torch.uint8)
    pixels[..., 3] = (255 * values.clamp(0, 1)).round().to(torch.uint8)
    return png(pixels)


def photograph(image: Tensor) -> str:
    """Encode an image (1 or 3, H, W) as a data URL, scaled to its own range."""
    image = image.detach().float().cpu()
    low, high = float(image.min()), float(image.max())
    levels = (255 * (image - low) / max(high - low, 1e-12)).round().to(torch.uint8)
    pixels = torch.full((*image.shape[1:], 4), 255, dtype=torch.uint8)
    pixels[..., :3] = levels.expand(3, -1, -1).permute(1, 2, 0)
    return png(pixels)


def bitmap(source: str, description: str, label: str, class_: str = "") -> str:
    """Write an image, a data URL, with a label below it, as HTML of a CSS class.

    The description is for readers who cannot see it.
    """
    return (
        f'<div class="{escape(class_)}"><img src="{escape(source)}" alt="{escape(description)}">'
        f"<span>{escape(label)}</span></div>"
    )


def shrunk(matrix: Tensor, most: int) -> Tensor:
    """Average neighbours of a matrix until it has at most `most` rows and columns."""
    rows, columns = (-(-length // most) for length in matrix.shape)
    if rows == columns == 1:
        return matrix
    return torch.nn.functional.avg_pool2d(matrix[None, None], (rows, columns), ceil_mode=True, count_include_pad=False)[
        0, 0
    ]


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
