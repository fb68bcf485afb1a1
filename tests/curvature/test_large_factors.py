"""Factors that are too large are kept as diagonals, and the fit and its plans say so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
import oracles
from bayeslim.curvature import ekfac, kfac
from bayeslim.errors import BayeslimWarning
from bayeslim.likelihoods import Categorical

LAYERS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 4)), (6,)),
    "grouped": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
        (4, 3, 3),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
        (2, 3),
    ),
}


def case(name: str):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    return make().double(), torch.randn(7, *shape).double(), torch.arange(7) % 3


@pytest.mark.parametrize("name", LAYERS)
def test_large_factors_are_the_diagonals_of_whole_ones(name):
    model, x, y = case(name)
    whole = kfac(model, [(x, y)], Categorical(), columns="exact")
    with pytest.warns(BayeslimWarning, match="factor of .* would take .* GB"):
        small = kfac(model, [(x, y)], Categorical(), columns="exact", max_side=3)
    assert set(small.layers) == set(whole.layers)
    assert small.diagonal_factors
    for key, layer in small.layers.items():
        for found, expected in ((layer.A, whole.layers[key].A), (layer.G, whole.layers[key].G)):
            kept = expected if found.ndim == 3 else expected.diagonal(dim1=1, dim2=2)
            torch.testing.assert_close(found, kept)
            assert (found.ndim == 2) == (expected.shape[-1] > 3)
        for a, b in zip(layer.diagonal().values(), whole.layers[key].diagonal().values(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore::bayeslim.errors.BayeslimWarning")
@pytest.mark.parametrize("max_side", [2, 3, 5])
@pytest.mark.parametrize("name", LAYERS)
def test_corrected_eigenvalues_of_large_factors_have_the_exact_trace(name, max_side):
    model, x, y = case(name)
    factors = kfac(model, [(x, y)], Categorical(), columns="exact", max_side=max_side)
    for key, found in ekfac(model, [(x, y)], Categorical(), factors, columns="exact").items():
        exact = oracles.ggn(model, [(x, y)], Categorical(), factors.layers[key].names)
        torch.testing.assert_close(found.corrected.sum(), exact.trace())


@pytest.mark.filterwarnings("ignore::bayeslim.errors.BayeslimWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_a_posterior_with_large_factors_predicts_prunes_and_is_saved(name, tmp_path):
    model, x, y = case(name)
    bnn = bl.bayesianize(model, bl.Laplace(max_side=3), likelihood=Categorical())
    result = bnn.fit([(x, y)], progress=False)
    reasons = result.details["diagonal_factors"]
    assert "0.weight" in reasons
    assert "would take" in reasons["0.weight"]
    bl.save(bnn, tmp_path / "bnn")
    again = bl.load(tmp_path / "bnn", model=case(name)[0])
    torch.testing.assert_close(bl.predict(again, x).probs, bl.predict(bnn, x).probs)
    plan = bl.plan(bnn, bl.Budget(sparsity=0.5))
    assert any('"0.weight": correlations between its' in note for note in plan.notes)
    pruned = bl.prune(bnn, plan)
    assert pruned.posterior_.mean["0.weight"].count_nonzero() < model[0].weight.numel()
    assert torch.isfinite(bl.predict(pruned, x).probs).all()
    assert bl.log_evidence(bnn, [(x, y)]).value < 0


def test_a_large_convolution_fits_in_memory():
    """Its whole input factor would take 34 GB."""
    model = nn.Sequential(nn.Conv1d(1024, 2, 64), nn.Flatten(), nn.Linear(4, 2))
    x, y = torch.randn(2, 1024, 65), torch.tensor([0, 1])
    with pytest.warns(BayeslimWarning, match=r"input factor of 65,537 × 65,537 would take 34\.4 GB"):
        factors = kfac(model, [(x, y)], Categorical())
    assert factors.layers["0.weight"].A.shape == (1, 65_537)
    assert "0.weight" in repr(factors)
