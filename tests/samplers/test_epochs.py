"""The noise of minibatches that share no example cancels over an epoch, and is not to be made up for.

Rows are chains of one regression, each with an order of the data of its own: independent draws, whose common moments
have the errors of independent samples.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bayeslim.samplers import StochasticHamiltonian
from oracles import linear_regression

ROWS, NUM_DATA, NOISE = 400, 100, 0.5
GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(NUM_DATA, 3, generator=GENERATOR, dtype=torch.float64) * torch.tensor([1.0, 0.7, 0.3])
Y = X.sum(1) + NOISE * torch.randn(NUM_DATA, generator=GENERATOR, dtype=torch.float64)
MEAN, COVARIANCE = linear_regression(X, Y, NOISE, 1.0)[:2]


def ratios(lr: float, batch: int, snapshots: int = 10, **settings) -> Tensor:
    """Variances along the eigenvectors of the posterior, over the exact ones; each of thousands of draws."""
    torch.manual_seed(3)
    values, vectors = torch.linalg.eigh(COVARIANCE)
    products = torch.cat([(X[:, :, None] * X[:, None]).flatten(1), X * Y[:, None]], 1) / NOISE**2
    w = nn.Parameter(MEAN.repeat(ROWS, 1))
    apart, adapt_steps = int(0.1 / lr) + 40, 400
    sampler = StochasticHamiltonian([w], lr, num_data=NUM_DATA, adapt_steps=adapt_steps, **settings)
    found, orders = [], torch.rand(2000, NUM_DATA).argsort(1)
    for step in range(adapt_steps + snapshots * apart):
        turn = step % (NUM_DATA // batch)
        if turn == 0:
            places = orders[torch.randint(len(orders), (ROWS,))]
        sums = (places // batch == turn).double() @ products / batch
        now = w.detach()
        w.grad = (sums[:, :9].view(-1, 3, 3) @ now[:, :, None])[:, :, 0] - sums[:, 9:] + now / NUM_DATA
        sampler.step()
        if step >= adapt_steps and (step + 1 - adapt_steps) % apart == 0:
            found.append(((w.detach() - MEAN) @ vectors).square().mean(0) / values)
    return torch.stack(found).mean(0)


@pytest.mark.parametrize(("lr", "batch"), [(1e-3, 50), (3e-3, 25)])
def test_variances_with_adapted_scales(lr, batch):
    assert (ratios(lr, batch) - 1).abs().max() < 4.5 * (2 / (10 * ROWS)) ** 0.5


def test_to_leave_out_what_cancels_makes_the_chain_too_cold():
    assert ratios(3e-3, 50, independent=True).min() < 0.85


def test_what_small_batches_add_vanishes_faster_than_the_step():
    excess = [float(ratios(lr, 5).max()) - 1 for lr in (1e-2, 3e-3, 1e-3)]
    assert excess[0] > 1
    assert excess[1] < 0.25 * excess[0]
    assert excess[2] < 0.5 * excess[1]
