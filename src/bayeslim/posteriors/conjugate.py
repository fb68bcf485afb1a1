"""Conjugate gradients and log-determinants for operators that are only known by their products.

`conjugate_gradients` solves P x = b for a batch of independent symmetric positive-definite systems, each over the last
two dimensions (Hestenes & Stiefel 1952), with a preconditioner. `log_det_estimate` is stochastic Lanczos quadrature:
log|P| = E[zᵀ (log P) z] over random signs z, the quadratic form by the Gauss rule of the Lanczos tridiagonal matrix
(Ubaru, Chen & Saad 2017).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bayeslim.errors import BayeslimWarning

Operator = Callable[[Tensor], Tensor]

AT_ONCE = 2**26
"""How many numbers the probes of a log-determinant hold together, unless one has more."""


@dataclass(frozen=True)
class Solver:
    """How far conjugate gradients go.

    Attributes:
        tolerance: stop when the preconditioned residual has fallen by this factor.
        max_iterations: stop after this many products, with a warning.
    """

    tolerance: float = 1e-6
    max_iterations: int = 2000

    def __post_init__(self) -> None:
        if not self.tolerance > 0 or self.max_iterations < 1:
            raise ValueError(f"A solver needs tolerance > 0 and max_iterations ≥ 1. Got {self}.")


DEFAULT_SOLVER = Solver()


@dataclass(frozen=True)
class Solve:
    """How the survivors of one layer were solved for.

    Attributes:
        how: "joint", or "row" if every row was solved by itself.
        iterations: of conjugate gradients; 0 for a direct solve.
        residual: ‖b − P_RR x‖ / ‖b‖ at the end, in float64.
    """

    how: Literal["joint", "row"]
    iterations: int
    residual: float

    def __str__(self) -> str:
        steps = f"{self.iterations} iterations, " if self.iterations else ""
        return f"{self.how}: {steps}residual {self.residual:.1e}"


@dataclass(frozen=True, eq=False)
class Solution:
    """What conjugate gradients found: the value, after how many iterations, and how far the residual fell at worst."""

    value: Tensor
    iterations: int
    residual: float


def conjugate_gradients(product: Operator, rhs: Tensor, precondition: Operator, solver: Solver) -> Solution:
    """Solve P x = b for every system in a batch (..., m, n), starting at zero.

    Both operators must keep the systems apart and map the subspace that `rhs` lies in to itself.

    Returns:
        the solution; when the tolerance was not reached, with a `BayeslimWarning`.
    """
    x = torch.zeros_like(rhs)
    residual = rhs
    z = precondition(residual)
    direction = z
    energy = start = _dot(residual, z)
    active = start > 0
    iterations = 0
    while bool(active.any()) and iterations < solver.max_iterations:
        image = product(direction)
        curvature = _dot(direction, image)
        active = active & (curvature > 0)
        step = torch.where(active, energy / curvature, 0.0)
        x = x + step * direction
        residual = residual - step * image
        z = precondition(residual)
        previous, energy = energy, torch.where(active, _dot(residual, z), energy)
        direction = z + torch.where(active, energy / previous, 0.0) * direction
        active = active & (energy > solver.tolerance**2 * start)
        iterations += 1
    worst = float((energy / start).nan_to_num(0.0).clamp(min=0).max().sqrt()) if rhs.numel() else 0.0
    if worst > solver.tolerance:
        warnings.warn(
            f"Conjugate gradients stopped after {iterations} iterations with the residual at {worst:.2g} of its start; "
            f"{solver.tolerance:g} was asked for. Raise max_iterations, the tolerance, or the prior precision, "
            "or use float64 factors.",
            BayeslimWarning,
            stacklevel=2,
        )
    return Solution(x, iterations, worst)


def log_det_estimate(
    product: Operator, support: Tensor, dtype: torch.dtype, *, probes: int = 16, steps: int = 64
) -> Tensor:
    """Estimate log|P| for a batch of systems (..., m, n), each restricted to where `support` is True.

    Its standard error falls with 1/√probes; the probes are the same at every call, so estimates are reproducible and
    comparable. Scale the operator to a unit diagonal for a small error.

    Returns:
        log-determinants, one for each system.
    """
    generator = torch.Generator(support.device).manual_seed(0)
    count = support.sum((-2, -1), keepdim=True).double()
    unit = (support / count.clamp(min=1).sqrt()).to(dtype)
    together = min(probes, max(1, AT_ONCE // max(1, support.numel())))
    total = torch.zeros_like(count[..., 0, 0])
    for start in range(0, probes, together):
        shape = (min(together, probes - start), *support.shape)
        signs = torch.randint(0, 2, shape, generator=generator, device=support.device, dtype=torch.int8)
        total = total + _quadrature(product, (2 * signs - 1) * unit, steps).sum(0)
    return total / probes * count[..., 0, 0]


def _quadrature(product: Operator, start: Tensor, steps: int) -> Tensor:
    """zᵀ (log P) z for unit vectors z, by Lanczos from each."""
    vector, previous = start, torch.zeros_like(start)
    beta = torch.zeros_like(start[..., :1, :1])
    alphas, betas = [], []
    for _ in range(steps):
        image = product(vector) - beta * previous
        alpha = _dot(vector, image)
        image = image - alpha * vector
        beta = _dot(image, image).sqrt()
        previous, vector = vector, torch.where(beta > 0, image / beta, 0.0)
        alphas.append(alpha.double()[..., 0, 0])
        betas.append(beta.double()[..., 0, 0])
    off = torch.diag_embed(torch.stack(betas[:-1], -1), 1)
    values, vectors = torch.linalg.eigh(torch.diag_embed(torch.stack(alphas, -1)) + off + off.mT)
    logs = values.clamp(min=torch.finfo(start.dtype).tiny).log()
    quadrature: Tensor = (vectors[..., 0, :].square() * logs).sum(-1)
    return quadrature


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1), keepdim=True)
