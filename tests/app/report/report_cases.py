"""A small pruned network and its data, for the tests of the report."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import bayeslim as bl


class Case:
    """A network before and after a cut, with held-out data."""

    def __init__(self, granularity: str, method: bl.Method, sparsity: float = 0.7):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(240, 1, 3, 4, generator=generator)
        y = (x.flatten(1)[:, :3]).argmax(1)
        self.train = bl.data.Loader(x[:160], y[:160], batch_size=40)
        self.held_out = [(x[160:200], y[160:200]), (x[200:], y[200:])]
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Flatten(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)
        )
        self.bnn = bl.bayesianize(network, method, likelihood=bl.likelihoods.Categorical())
        self.bnn.fit(self.train, epochs=15, lr=0.02, seed=0)
        self.bnn.eval()
        budget = bl.Budget(sparsity=sparsity, empty_layers="keep best")
        self.pruned = bl.prune(self.bnn, budget, granularity=granularity, example=x[:4])
        self.slim = bl.compact(self.pruned, x[:4])
        self.example = x[:4]


@cache
def laplace(granularity: str = "weight") -> Case:
    """With correlated weights."""
    return Case(granularity, bl.Laplace())


@cache
def variational() -> Case:
    """With independent weights."""
    return Case("weight", bl.Variational())
