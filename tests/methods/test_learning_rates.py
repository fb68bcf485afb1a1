"""Every method trains at its own learning rate where none is given, and at another where one is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.likelihoods import Categorical, Gaussian

METHODS = {
    "sgld": bl.SGLD(samples=5),
    "psgld": bl.PSGLD(samples=5),
    "sghmc": bl.SGHMC(samples=5),
    "sghmc-adapted": bl.SGHMC(samples=5, adapt=True),
    "sgnht": bl.SGNHT(samples=5),
    "ivon": bl.IVON(),
    "variational": bl.Variational(),
    "svgd": bl.SVGD(particles=3),
}


def classes() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(400, 4)
    return x, (x[:, 0] * x[:, 1] > 0).long()


@pytest.mark.parametrize(
    ("kind", "epochs"),
    [("sgld", 30), ("psgld", 40), ("sghmc-adapted", 15), ("ivon", 15), ("variational", 40), ("svgd", 40)],
)
def test_the_default_learns(kind, epochs):
    x, y = classes()
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 2))
    bnn = bl.bayesianize(model, METHODS[kind], likelihood=Categorical(), prior=bl.priors.Normal(2.0))
    bnn.fit(bl.data.Loader(x, y, batch_size=20), epochs=epochs, seed=1, progress=False)
    error = (bl.predict(bnn, x).probs.argmax(-1) != y).float().mean()
    assert error < 0.2  # half, for one that has learned nothing


@pytest.mark.parametrize("kind", ["sgld", "sghmc", "sgnht", "ivon"])
def test_the_default_is_smaller_where_the_loss_is_steep(kind):
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    bnn = bl.bayesianize(nn.Linear(3, 1), METHODS[kind], likelihood=Gaussian(0.05))
    bnn.fit(bl.data.Loader(x, y, batch_size=20), epochs=40, seed=1, progress=False)
    assert (bl.predict(bnn, x).mean - y).square().mean() < 0.01 * y.var()


def test_rates_of_optimizers():
    for method, likelihood, rate in (
        (bl.SGLD(), Categorical(), 0.1),
        (bl.SGLD(), Gaussian(0.1), 1e-3),
        (bl.SGLD(), Gaussian(3.0), 0.1),
        (bl.SGLD(), Gaussian("heteroscedastic"), 0.1),
        (bl.SGHMC(), Categorical(), 0.03),
        (bl.SGHMC(adapt=True), Gaussian(0.1), 1e-4),
        (bl.PSGLD(), Gaussian(0.1), 3e-4),
        (bl.IVON(), Categorical(), 0.1),
        (bl.Variational(), Categorical(), 1e-3),
    ):
        bnn = bl.bayesianize(nn.Linear(3, 2), method, likelihood=likelihood, num_data=10)
        assert bnn.optimizer().param_groups[0]["lr"] == pytest.approx(rate)
        assert bnn.optimizer(lr=0.5).param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("kind", ["sgld", "ivon"])
def test_a_rate_that_is_given_is_heard(kind):
    x, y = classes()
    model = nn.Linear(4, 2)
    bnn = bl.bayesianize(model, METHODS[kind], likelihood=Categorical())
    bnn.fit(bl.data.Loader(x, y, batch_size=100), epochs=3, lr=1e-14, seed=1, progress=False)
    torch.testing.assert_close(bnn.mean_network().weight, model.weight)
