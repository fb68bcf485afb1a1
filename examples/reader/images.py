"""Training images of the digit reader: deformed digits, and images that are no digits.

Both are made from the training digits of MNIST alone. No letter is used in training.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

NOT_A_DIGIT = 10
"""The class of images that are no digits."""
SIDE = 28
MAX_ROTATION, MAX_SHEAR, MAX_ZOOM, MAX_SHIFT = 0.15, 0.15, 0.1, 0.1
"""Limits of the random affine maps; a shift of 1 is half the width."""
ELASTIC = 0.05
"""Standard deviation of the elastic displacements; 1 is half the width."""

PLAIN_IMAGES = 0.2
"""The share of images that are not deformed."""


class TrainingImages:
    """Batches of deformed digits with some images that are no digits, new ones in every epoch.

    Args:
        x: digits, (N, 1, 28, 28), from 0 to 1.
        y: their labels.
        batch_size: digits of a batch.
        others: images of a batch that are no digits.
    """

    def __init__(self, x: Tensor, y: Tensor, batch_size: int = 128, others: int = 18):
        self.x, self.y, self.batch_size, self.others = x, y, batch_size, others
        self.dataset = range(len(self) * (batch_size + others))

    def __len__(self) -> int:
        return len(self.y) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.y), device=self.x.device)
        for batch in range(len(self)):
            rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            x = torch.cat([self.x[rows], not_digits(self.x[rows], self.others)])
            # digits and others are resampled alike: a network would tell unsharp digits from sharp images
            plain = torch.rand(len(x), 1, 1, 1, device=x.device) < PLAIN_IMAGES
            x = torch.where(plain, x, deformed(x))
            yield x, F.pad(self.y[rows], (0, self.others), value=NOT_A_DIGIT)


def deformed(x: Tensor) -> Tensor:
    """Rotate, shear, zoom and shift images at random, and bend them elastically."""
    rotation, shear, up, right, across, down = uniform(6, len(x), x.device)
    rotation, shear = MAX_ROTATION * rotation, MAX_SHEAR * shear
    cos, sin = rotation.cos() * (1 + MAX_ZOOM * up), rotation.sin() * (1 + MAX_ZOOM * right)
    rows = torch.stack([cos, shear - sin, MAX_SHIFT * across, sin, cos, MAX_SHIFT * down], 1)
    grid = F.affine_grid(rows.view(-1, 2, 3), list(x.shape), align_corners=False)
    bends = ELASTIC * torch.randn(len(x), 2, 5, 5, device=x.device)
    bends = F.interpolate(bends, size=(SIDE, SIDE), mode="bicubic", align_corners=True)
    return F.grid_sample(x, grid + bends.permute(0, 2, 3, 1), align_corners=False)


def not_digits(x: Tensor, count: int) -> Tensor:
    """Make images that are no digits: torn, inverted, swollen and mixed digits, blobs, bars."""
    x = x[torch.randint(len(x), (count,), device=x.device)]
    kinds = [torn, inverted, magnified, mixed, blobs, bars]
    return torch.cat([kind(part) for kind, part in zip(kinds, x.chunk(len(kinds)), strict=False)])


def torn(x: Tensor) -> Tensor:
    """Swap the quarters of each image, and take them from two images."""
    half = SIDE // 2
    moved = x.roll((half, half), (2, 3))
    moved[:, :, :half] = x.roll(1, 0).roll(half, 3)[:, :, :half]
    return moved


def inverted(x: Tensor) -> Tensor:
    """Swap black and white."""
    return 1 - x


def magnified(x: Tensor) -> Tensor:
    """Swell the strokes and enlarge the image, so that it fills the frame."""
    factor = 0.35 + 0.2 * torch.rand(len(x), device=x.device)
    rows = factor.view(-1, 1, 1) * torch.eye(2, 3, device=x.device)
    grid = F.affine_grid(rows, list(x.shape), align_corners=False)
    return F.grid_sample(F.max_pool2d(x, 3, 1, 1), grid, align_corners=False)


def mixed(x: Tensor) -> Tensor:
    """Lay two digits over each other, one of them upside down."""
    return torch.maximum(x, x.roll(1, 0).flip(2).roll(4, 3))


def blobs(x: Tensor) -> Tensor:
    """Draw random shapes with smooth edges."""
    side = int(torch.randint(3, 10, ()))
    field = torch.randn(len(x), 1, side, side, device=x.device)
    field = F.interpolate(field, size=(SIDE, SIDE), mode="bicubic", align_corners=True)
    return (4 * field).sigmoid()


def bars(x: Tensor) -> Tensor:
    """Draw three thick bars, upright or level, at random places."""
    at = torch.arange(SIDE, device=x.device)
    image = torch.zeros_like(x)
    for _ in range(3):
        centre, thickness, start, length, turned = torch.rand(5, len(x), 1, device=x.device)
        across = ((at - SIDE * centre).abs() < 2 + 3 * thickness).float()
        along = ((at >= 10 * start) & (at < 10 * start + 12 + 16 * length)).float()
        bar = across.unsqueeze(2) * along.unsqueeze(1)
        bar = torch.where(turned.unsqueeze(2) < 0.5, bar, bar.mT)
        image = torch.maximum(image, bar.unsqueeze(1))
    return image


def uniform(kinds: int, count: int, device: torch.device) -> Tensor:
    """Draw numbers from −1 to 1, (kinds, count)."""
    return 2 * torch.rand(kinds, count, device=device) - 1
