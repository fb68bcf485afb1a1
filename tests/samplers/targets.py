"""Targets whose moments are known, and how far draws are from them in standard errors.

A parameter of many rows is as many chains: the rows never meet, and what they hold at the end are independent draws, so
that the errors of their moments are those of independent samples.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayeslim.samplers import Sampler

CHAINS = 2000
MEAN = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
ROOT = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [-0.3, 0.2, 0.5]], dtype=torch.float64)
COVARIANCE = ROOT @ ROOT.T
PRECISION = COVARIANCE.inverse()
NUM_DATA = 50
"""The potential is this many times the loss."""


def errors(draws: Tensor, mean: Tensor = MEAN, covariance: Tensor = COVARIANCE) -> tuple[Tensor, Tensor]:
    """Errors of mean and covariance in standard errors, of independent draws (S, D), after whitening."""
    root = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(root, (draws - mean).T, upper=False).T
    count, size = white.shape
    scale = (1 + torch.eye(size, dtype=white.dtype)).sqrt()
    of_mean = white.mean(0) * count**0.5
    of_covariance = (white.T @ white / count - torch.eye(size, dtype=white.dtype)) * count**0.5 / scale
    return of_mean.abs(), of_covariance.abs()


def worst(draws: Tensor, mean: Tensor = MEAN, covariance: Tensor = COVARIANCE) -> float:
    """The largest of all errors."""
    return max(float(error.max()) for error in errors(draws, mean, covariance))


def run(
    build: Callable[..., Sampler], steps: int, noise: float = 0.0, chains: int = CHAINS, **settings
) -> tuple[Tensor, Sampler]:
    """Run chains on the Gaussian with noisy gradients; return their ends and the sampler."""
    w = torch.nn.Parameter(torch.zeros(chains, 3, dtype=torch.float64))
    sampler = build([w], num_data=NUM_DATA, **settings)
    for _ in range(steps):
        w.grad = (w.detach() - MEAN) @ PRECISION / NUM_DATA
        if noise:
            w.grad += noise * torch.randn_like(w)
        sampler.step()
    return w.detach(), sampler
