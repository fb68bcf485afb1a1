"""A linear regression on minibatches, with many outputs as many chains, and its exact posterior."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import bayeslim as bl
from bayeslim.likelihoods import Gaussian
from oracles import linear_regression

SIZE, NUM_DATA, BATCH, ROWS = 4, 200, 20, 40
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(NUM_DATA, SIZE, generator=GENERATOR).double()
Y = X.sum(1) + torch.randn(NUM_DATA, generator=GENERATOR).double()
MEAN, COVARIANCE = linear_regression(X, Y, 1.0, 1.0)[:2]
TARGETS = Y[:, None].expand(-1, ROWS).contiguous()


def batches(replacement: bool = False):
    """Load shuffled epochs, or batches drawn with replacement."""
    if not replacement:
        return bl.data.Loader(X, TARGETS, batch_size=BATCH)
    data = TensorDataset(X, TARGETS)
    return DataLoader(data, batch_size=BATCH, sampler=RandomSampler(data, replacement=True))


def sampled(method: bl.Method, loader, **options) -> tuple[bl.Bayesian, bl.Fit]:
    torch.manual_seed(0)
    bnn = bl.bayesianize(nn.Linear(SIZE, ROWS, bias=False).double(), method, likelihood=Gaussian(1.0))
    return bnn, bnn.fit(loader, seed=1, progress=False, **options)


def variance_over_exact(bnn: bl.Bayesian) -> float:
    off: Tensor = bnn.posterior_.values["weight"] - MEAN
    return float((off.square().mean((0, 1)) / COVARIANCE.diagonal()).mean())
