"""Stein's direction: where a set of points has to move to become a sample of a distribution.

    φ(x_i) = (1/n) Σ_j [ k(x_j, x_i) ∇ log p(x_j) + ∇_{x_j} k(x_j, x_i) ]        k(x, x') = exp(−‖x − x'‖² / h)

The first part draws points to where the density is high, each along the gradients of its neighbours; the second keeps
them apart. The bandwidth is h = med² / log n, with med the median distance between two points, so that Σ_j k(x_j, x_i)
is about n · (1/n) = 1 and a point's own gradient is balanced by its neighbours'.

Liu & Wang 2016, arXiv:1608.04471
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kernel(points: Tensor, bandwidth: float | None = None) -> tuple[Tensor, Tensor]:
    """K between all points (n, D), (n, n), and its bandwidth h.

    Args:
        points: one a row.
        bandwidth: h; by the median of distances if not given.
    """
    n = len(points)
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    if bandwidth is not None:
        h = distances.new_tensor(bandwidth)
    elif n == 1:
        h = distances.new_ones(())
    else:
        apart = distances[~torch.eye(n, dtype=torch.bool, device=points.device)]
        h = apart.median() / math.log(n)
    h = h.clamp_min(torch.finfo(points.dtype).tiny * 1e4)  # all points in one place
    return (-distances / h).exp(), h


def descent(points: Tensor, gradients: Tensor, num_data: int, bandwidth: float | None = None) -> tuple[Tensor, Tensor]:
    """−φ / N, to go down along, with the gradients of −log p / N; and (1/n) Σ_j k(x_j, x_i) of every point.

    Args:
        points: (n, D).
        gradients: of every point's own loss, −log p / N, (n, D).
        num_data: N.
        bandwidth: h; by the median of distances if not given.
    """
    k, h = kernel(points, bandwidth)
    total = k.sum(1, keepdim=True)
    apart = (k @ points - total * points) * (2 / (h * num_data))
    return (k @ gradients + apart) / len(points), total[:, 0] / len(points)
