import pytest
import torch
from curved_networks import make
from test_kfac import block, product

import oracles
from bayeslim.curvature import Factors, diag, ekfac, kfac
from bayeslim.errors import ShapeMismatch


def bases(factors):
    """The eigenbasis Q_G ⊗ Q_A of all groups, as one matrix."""
    A = factors.inputs.vectors
    A = torch.eye(factors.inputs.size, dtype=torch.float64)[None] if A is None else A
    return torch.block_diag(*(torch.kron(g, a) for g, a in zip(factors.outputs.vectors, A, strict=True)))


@pytest.mark.parametrize(
    "name",
    ["mlp", "convolutions and norms", "twice", "words", "attention, time first", "own parameter", "segmentation"],
)
def test_eigenvalues_are_the_second_moments_in_the_basis(name):
    case = make(name)
    truth = oracles.ggn(case.model, case.batches(), case.likelihood)
    kron = kfac(case.model, case.batches(), case.likelihood, columns="exact")
    corrected = ekfac(case.model, case.batches(), case.likelihood, kron, columns="exact")
    assert set(corrected) == set(kron.layers)
    for key, factors in corrected.items():
        Q, H = bases(factors), block(truth, case.model, kron.layers[key])
        torch.testing.assert_close(factors.corrected.flatten(), (Q.T @ H @ Q).diagonal(), rtol=1e-8, atol=1e-11)
        better = (Q @ torch.diag(factors.corrected.flatten()) @ Q.T - H).norm()
        assert better <= (product(kron.layers[key]) - H).norm() + 1e-9


def test_keeps_the_trace():
    case = make("convolutions and norms")
    kron = kfac(case.model, case.batches(), case.likelihood)
    exact = diag(case.model, case.batches(), case.likelihood)
    for key, factors in ekfac(case.model, case.batches(), case.likelihood, kron, columns="exact").items():
        trace = sum(exact[name].sum() for name in kron.layers[key].names)
        torch.testing.assert_close(factors.corrected.sum(), trace)


def test_needs_factors():
    case = make("mlp")
    with pytest.raises(ShapeMismatch, match="there is no layer with factors"):
        ekfac(case.model, case.batches(), case.likelihood, Factors({}))
