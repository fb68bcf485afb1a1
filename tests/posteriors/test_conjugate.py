import pytest
import torch
from dense_gaussians import eye, psd

from bayeslim.posteriors.conjugate import Solver, conjugate_gradients, log_det_estimate


def systems():
    """Three independent systems of very different scales, (3, 6, 1)."""
    generator = torch.Generator().manual_seed(0)
    matrix = psd(3, 6, generator=generator) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None] + 1e-6 * eye(6)
    return matrix, torch.randn(3, 6, 1, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("preconditioned", [False, True])
def test_solves_every_system_of_a_batch(preconditioned):
    matrix, rhs = systems()
    scale = matrix.diagonal(dim1=1, dim2=2)[..., None] if preconditioned else 1.0
    solution = conjugate_gradients(lambda v: matrix @ v, rhs, lambda r: r / scale, Solver(1e-12, 200))
    torch.testing.assert_close(solution.value, torch.linalg.solve(matrix, rhs), rtol=1e-7, atol=1e-9)
    assert solution.residual <= 1e-12


def test_a_perfect_preconditioner_needs_one_step():
    matrix, rhs = systems()
    solution = conjugate_gradients(
        lambda v: matrix @ v, rhs, lambda r: torch.linalg.solve(matrix, r), Solver(1e-8, 200)
    )
    assert solution.iterations == 1


def test_nothing_to_solve():
    matrix, rhs = systems()
    solution = conjugate_gradients(lambda v: matrix @ v, torch.zeros_like(rhs), lambda r: r, Solver())
    assert solution.iterations == 0
    assert not bool(solution.value.any())
    one = rhs * torch.tensor([0.0, 1.0, 0.0])[:, None, None]
    value = conjugate_gradients(lambda v: matrix @ v, one, lambda r: r, Solver(1e-12, 200)).value
    torch.testing.assert_close(value, torch.linalg.solve(matrix, one), rtol=1e-7, atol=1e-9)


def test_stopping_early_is_reported():
    matrix, rhs = systems()
    solution = conjugate_gradients(lambda v: matrix @ v, rhs, lambda r: r, Solver(1e-12, 1))
    assert not solution.converged
    assert solution.iterations == 1
    assert solution.residual > 1e-12
    with pytest.raises(ValueError, match="max_iterations"):
        Solver(max_iterations=0)


def test_log_determinant_of_a_batch():
    generator = torch.Generator().manual_seed(0)
    matrix = psd(2, 40, generator=generator, rank=200) + 0.5 * eye(40)
    support = torch.ones(2, 40, 1, dtype=torch.bool)
    support[1, 20:] = False
    wanted = torch.stack([torch.linalg.slogdet(matrix[0])[1], torch.linalg.slogdet(matrix[1, :20, :20])[1]])

    def masked(v):
        return (matrix @ (v * support)) * support

    estimate = log_det_estimate(masked, support, torch.float64, probes=400)
    assert bool(((estimate - wanted).abs() < 0.5).all())
    assert bool((wanted.abs() > 2).all())
    few = log_det_estimate(masked, support, torch.float64)
    assert torch.equal(few, log_det_estimate(masked, support, torch.float64))
    assert log_det_estimate(masked, torch.zeros_like(support), torch.float64).tolist() == [0.0, 0.0]
