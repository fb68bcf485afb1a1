"""Targets that a likelihood leaves out count nowhere, and data without any other are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import BayeslimError

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)
NONE = [(X, torch.full((40,), -100))]


@pytest.fixture(scope="module")
def fitted() -> bl.Bayesian:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    bnn = bl.bayesianize(network, bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    bnn.fit([(X, Y)], epochs=20, lr=0.05, progress=False)
    return bnn


def test_curvature_needs_a_label(fitted):
    bnn = bl.bayesianize(fitted.mean_network(), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    with pytest.raises(BayeslimError, match=r"All targets are -100, .* nothing to learn from"):
        bnn.fit(NONE, progress=False)


def test_evidence_needs_a_label(fitted):
    with pytest.raises(BayeslimError, match=r"All targets are -100, .* nothing to learn from"):
        bl.log_evidence(fitted, NONE, progress=False)


@pytest.mark.parametrize("search", [bl.prune, bl.quantise])
def test_a_search_needs_a_validation_label(fitted, search):
    budget = {"example": X} if search is bl.prune else {}
    goal = (bl.Budget(max_error_increase=5),) if search is bl.prune else ()
    budget |= {} if search is bl.prune else {"max_error_increase": 5}
    with pytest.raises(BayeslimError, match="All validation targets are -100"):
        search(fitted, *goal, validate=NONE, **budget)


def test_a_search_does_not_count_ignored_labels(fitted):
    """Padding would dilute the error, and more would be cut."""
    padded = torch.cat([X, torch.zeros(960, 4)]), torch.cat([Y, torch.full((960,), -100)])
    budget = bl.Budget(max_error_increase=5)
    plain, among = (bl.prune(fitted, budget, validate=[data], example=X).plan_ for data in ((X, Y), padded))
    assert all(torch.equal(plain.masks[name], among.masks[name]) for name in plain.masks)
    assert any(not bool(mask.all()) for mask in plain.masks.values())
