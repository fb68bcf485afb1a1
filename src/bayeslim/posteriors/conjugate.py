"""Conjugate gradients and log-determinants for operators that are only known by their products.

`conjugate_gradients` solves P x = b for a batch of independent symmetric positive-definite systems, each over the last
two dimensions (Hestenes & Stiefel 1952), with a preconditioner. The recursion's own residual drifts away from b − P x
where P is ill-conditioned, so it is computed anew whenever the recursion ends, and the recursion starts again from
there while that helps. `log_det_estimate` is stochastic Lanczos quadrature: log|P| = E[zᵀ (log P) z] over
random signs z, the quadratic form by the Gauss rule of the Lanczos tridiagonal matrix (Ubaru, Chen & Saad 2017).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bayeslim.errors import check_number, check_whole

Operator = Callable[[Tensor], Tensor]

MAX_NUMBERS_PER_PROBES = 2**26
"""The probes of a log-determinant that are used at once hold at most this many numbers, or one probe."""

MIN_GAIN_PER_RESTART = 0.5
"""The recursion starts again while a restart lowers the residual at least by this factor."""


@dataclass(frozen=True)
class Solver:
    """When conjugate gradients stop.

    Attributes:
        tolerance: stop when the error of x, in the norm of P, is at most this fraction of x.
        max_iterations: stop after this many products.
    """

    tolerance: float = 1e-5
    max_iterations: int = 2000

    def __post_init__(self) -> None:
        check_number("tolerance", self.tolerance, above=0, below=1)
        check_whole("max_iterations", self.max_iterations)


DEFAULT_SOLVER = Solver()


@dataclass(frozen=True)
class Solve:
    """How the survivors of one layer were solved for.

    Attributes:
        how: "joint", or "row" if every row was solved by itself.
        iterations: of conjugate gradients; 0 for a direct solve, and where nothing had to move.
        residual: ‖b − P_RR x‖ / ‖b‖ at the end, in float64.
        converged: whether the tolerance was reached.
    """

    how: Literal["joint", "row"]
    iterations: int
    residual: float
    converged: bool = True

    def __str__(self) -> str:
        steps = f"{self.iterations} iterations, " if self.iterations else ""
        return f"{self.how}: {steps}residual {self.residual:.1e}{'' if self.converged else ', not converged'}"


@dataclass(frozen=True, eq=False)
class Solution:
    """The result of conjugate gradients.

    Attributes:
        value: x.
        iterations: the number of products.
        residual: the largest preconditioned residual √(rᵀ M r) of a system, relative to √(xᵀ P x).
        converged: whether all systems reached the tolerance.
    """

    value: Tensor
    iterations: int
    residual: float
    converged: bool


def conjugate_gradients(
    product: Operator, rhs: Tensor, precondition: Operator, solver: Solver, start: Tensor | None = None
) -> Solution:
    """Solve P x = b for every system in a batch (..., m, n).

    It starts at zero, or at `start`. Both operators must keep the systems apart and map the subspace that `rhs` lies in
    to itself.
    """
    if start is None:
        state = _State(torch.zeros_like(rhs), rhs, torch.zeros_like(dot(rhs, rhs)))
    else:
        image = product(start)
        state = _State(start, rhs - image, dot(start, image))
    best, worst, iterations = state.x, torch.inf, 0
    while iterations < solver.max_iterations:
        state, used = _recursion(product, precondition, state, solver, solver.max_iterations - iterations)
        iterations += used
        residual = rhs - product(state.x)
        state = _State(state.x, residual, state.size)
        relative = _worst(dot(residual, precondition(residual)), state.size)
        improved = relative < MIN_GAIN_PER_RESTART * worst
        if relative <= worst:
            best, worst = state.x, relative
        if not used or relative <= solver.tolerance or not improved:
            break
    return Solution(best, iterations, worst, worst <= solver.tolerance)


@dataclass(frozen=True, eq=False)
class _State:
    """Where the recursion stands: x, b − P x, and xᵀ P x."""

    x: Tensor
    residual: Tensor
    size: Tensor


def _recursion(
    product: Operator, precondition: Operator, state: _State, solver: Solver, max_iterations: int
) -> tuple[_State, int]:
    """Iterate until rᵀ M r ≤ tolerance² xᵀ P x, or P or M is not positive to rounding.

    The error e of x has eᵀ P e ≤ rᵀ M r for a preconditioner M that is no smaller than P⁻¹, such as a masked inverse.
    """
    x, residual, size = state.x, state.residual, state.size
    direction = z = precondition(residual)
    energy = dot(residual, z)
    active = energy > solver.tolerance**2 * size
    iterations = 0
    while bool(active.any()) and iterations < max_iterations:
        image = product(direction)
        curvature = dot(direction, image)
        active = active & (curvature > 0)
        step = torch.where(active, energy / curvature, 0.0)
        x = x + step * direction
        size = size + step * energy
        residual = residual - step * image
        z = precondition(residual)
        previous, energy = energy, torch.where(active, dot(residual, z), energy)
        direction = z + torch.where(active, energy / previous, 0.0) * direction
        active = active & (energy > solver.tolerance**2 * size)
        iterations += 1
    return _State(x, residual, size), iterations


def _worst(energy: Tensor, size: Tensor) -> float:
    """Compute the largest √(energy / size) of a system; zero without any residual."""
    ratio = torch.where(energy > 0, energy / size, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(ratio.max().sqrt()) if ratio.numel() else 0.0


def log_det_estimate(
    product: Operator, support: Tensor, dtype: torch.dtype, *, probes: int = 16, steps: int = 64
) -> Tensor:
    """Estimate log|P| for systems (..., m, n), restricted to where `support` is True.

    Its standard error falls with 1/√probes; the probes are the same at every call, so estimates are reproducible and
    comparable. Scale the operator to a unit diagonal for a small error.

    Returns:
        log-determinants, one for each system.
    """
    generator = torch.Generator(support.device).manual_seed(0)
    count = support.sum((-2, -1), keepdim=True).double()
    unit = (support / count.clamp(min=1).sqrt()).to(dtype)
    together = min(probes, max(1, MAX_NUMBERS_PER_PROBES // max(1, support.numel())))
    total = torch.zeros_like(count[..., 0, 0])
    for start in range(0, probes, together):
        shape = (min(together, probes - start), *support.shape)
        signs = torch.randint(0, 2, shape, generator=generator, device=support.device, dtype=torch.int8)
        total = total + _quadrature(product, (2 * signs - 1) * unit, steps).sum(0)
    return total / probes * count[..., 0, 0]


def _quadrature(product: Operator, start: Tensor, steps: int) -> Tensor:
    """Compute zᵀ (log P) z for unit vectors z, by Lanczos from each."""
    vector, previous = start, torch.zeros_like(start)
    beta = torch.zeros_like(start[..., :1, :1])
    alphas, betas = [], []
    for _ in range(steps):
        image = product(vector) - beta * previous
        alpha = dot(vector, image)
        image = image - alpha * vector
        beta = dot(image, image).sqrt()
        previous, vector = vector, torch.where(beta > 0, image / beta, 0.0)
        alphas.append(alpha.double()[..., 0, 0])
        betas.append(beta.double()[..., 0, 0])
    off = torch.diag_embed(torch.stack(betas[:-1], -1), 1)
    values, vectors = torch.linalg.eigh(torch.diag_embed(torch.stack(alphas, -1)) + off + off.mT)
    logs = values.clamp(min=torch.finfo(start.dtype).tiny).log()
    quadrature: Tensor = (vectors[..., 0, :].square() * logs).sum(-1)
    return quadrature


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum products over the last two dimensions, which stay with size one."""
    return (a * b).sum((-2, -1), keepdim=True)
