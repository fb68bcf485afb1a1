"""Methods of every kind can be teachers."""

from __future__ import annotations

import pytest
import torch
from method_table import A_THIRD, METHODS
from torch import nn

import bayeslim as bl

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


@pytest.mark.parametrize("method", A_THIRD)
def test_every_kind_of_method_teaches(method):
    loader = bl.data.Loader(X, Y, batch_size=8)
    teacher = bl.bayesianize(network(), METHODS[method](), likelihood=bl.likelihoods.Categorical())
    teacher.fit(loader, epochs=2, seed=0, progress=False)
    p = bl.predict(teacher, X, generator=torch.Generator().manual_seed(0)).probs
    for how in ("probs", "online"):
        torch.manual_seed(0)
        untaught = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        student = bl.distill(teacher, loader, untaught, how=how, epochs=20, lr=0.01, seed=0, progress=False)
        with torch.no_grad():
            before, after = ((p * (p.log() - s(X).log_softmax(-1))).sum(-1).mean() for s in (untaught, student))
        assert after < before / 2, how
