"""A small network on the digits that ship with the package, with a variational posterior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import bayeslim as bl

HIDDEN = 100


def fit_digits(prior: bl.priors.Prior, epochs: int, callbacks: Sequence[Callable[[Any], None]] = ()) -> bl.Bayesian:
    """Train a variational posterior over the weights of 64-100-10 units."""
    digits = bl.data.load("digits")
    loader = bl.data.Loader(digits.train_x, digits.train_y, batch_size=64)
    torch.manual_seed(0)
    network = bl.zoo.mlp(hidden=HIDDEN, inputs=64, depth=1)
    likelihood = bl.likelihoods.Categorical()
    bnn = bl.bayesianize(network, bl.Variational(std_rate=5.0), likelihood=likelihood, prior=prior)
    bnn.fit(loader, epochs=epochs, lr=3e-3, lr_schedule="half-then-linear", callbacks=callbacks, seed=0, progress=False)
    return bnn.eval()


def weights_of(values: dict[str, Tensor]) -> Tensor:
    """Concatenate the weights of all layers."""
    return torch.cat([value.detach().flatten() for value in values.values()])


def test_error(network: torch.nn.Module) -> float:
    """Compute the fraction of test digits that a network gets wrong."""
    digits = bl.data.load("digits")
    with torch.no_grad():
        return float((network.eval()(digits.test_x).argmax(-1) != digits.test_y).float().mean())
