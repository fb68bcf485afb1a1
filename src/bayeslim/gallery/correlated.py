"""Linear regression with two correlated weights: its posterior and its evidence are exact.

    y = w₁ x₁ + w₂ x₂ + noise,    w ~ N(0, 1)          p(w | D) = N(μ, P⁻¹),  P = XᵀX / σ² + I

Both inputs have the same variance, so that both weights have the same marginal variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import bayeslim as bl

WEIGHTS = torch.tensor([[0.9, 0.35]])


@dataclass(frozen=True, eq=False)
class Regression:
    """Data, the noise, and the exact posterior.

    Attributes:
        x: inputs, (N, 2).
        y: targets, (N, 1).
        noise: the standard deviation of the targets.
        mean: μ, (2,).
        covariance: P⁻¹, (2, 2).
        log_evidence: log p(D).
    """

    x: Tensor
    y: Tensor
    noise: float
    mean: Tensor
    covariance: Tensor
    log_evidence: float

    def bayesian(self, method: bl.Method) -> bl.Bayesian:
        """Make the linear network Bayesian, before it is fitted."""
        network = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            network.weight.copy_(self.mean)
        return bl.bayesianize(network, method, likelihood=bl.likelihoods.Gaussian(self.noise), sites="all")


def solve_regression(correlation: float, noise: float = 0.6, seed: int = 0) -> Regression:
    """Make data whose inputs have a correlation, and solve the regression exactly."""
    spread, tilt = math.sqrt((1 + correlation) / 2), math.sqrt((1 - correlation) / 2)
    corners = torch.tensor([[spread, spread], [-spread, -spread], [tilt, -tilt], [-tilt, tilt]])
    x = corners.repeat(3, 1)
    y = x @ WEIGHTS.T + noise * torch.randn(len(x), 1, generator=torch.Generator().manual_seed(seed))
    wide, targets = x.double(), y.double().squeeze(1)
    precision = wide.T @ wide / noise**2 + torch.eye(2, dtype=torch.float64)
    mean = torch.linalg.solve(precision, wide.T @ targets / noise**2)
    scatter = wide @ wide.T + noise**2 * torch.eye(len(x), dtype=torch.float64)
    evidence = torch.distributions.MultivariateNormal(torch.zeros_like(targets), scatter).log_prob(targets)
    return Regression(x, y, noise, mean, torch.linalg.inv(precision), float(evidence))


def ellipse(covariance: Tensor, centre: Tensor, radius: float = 1.0) -> Tensor:
    """Compute points of a contour of a Gaussian, (2, points).

    Args:
        covariance: (2, 2).
        centre: (2,).
        radius: the Mahalanobis distance of the contour from the centre.
    """
    angles = torch.linspace(0, 2 * math.pi, 181, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()])
    return torch.as_tensor(centre[:, None] + radius * torch.linalg.cholesky(covariance) @ circle)
