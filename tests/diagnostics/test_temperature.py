"""The configurational temperature tells hot chains from cold ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.diagnostics import Temperature, temperature
from bayeslim.errors import BayeslimError, UnsupportedModel
from bayeslim.likelihoods import Gaussian
from bayeslim.samplers import StochasticHamiltonian, Thermostat

X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)).double()
Y = X.sum(1, keepdim=True) + torch.randn(200, 1, generator=torch.Generator().manual_seed(1)).double()
TARGETS = Y.expand(-1, 20).contiguous()
DATA = [(X, TARGETS)]


def chain(method: bl.Method, batch_size: int = 20, **options) -> bl.Bayesian:
    torch.manual_seed(0)
    bnn = bl.bayesianize(nn.Linear(4, 20, bias=False).double(), method, likelihood=Gaussian(1.0))
    bnn.fit(bl.data.Loader(X, TARGETS, batch_size), seed=1, progress=False, **options)
    return bnn


def test_hamiltonian_monte_carlo_has_the_temperature_it_was_asked_for():
    for asked in (1.0, 0.25):
        bnn = chain(bl.HMC(samples=40, warmup=40, leapfrog=10, temperature=asked), batch_size=200)
        before = {name: value.clone() for name, value in bnn.state_dict().items()}
        found = temperature(bnn, DATA)
        assert found.target == asked
        assert found.value == pytest.approx(asked, rel=0.1)
        assert found.verdict == "right"
        assert all(torch.equal(value, before[name]) for name, value in bnn.state_dict().items())


def test_large_steps_on_minibatches_are_hot_and_thermostats_of_epochs_cold():
    hot = temperature(chain(bl.SGHMC(samples=40), epochs=60, lr=0.05), DATA)
    assert hot.verdict == "hot"
    assert "smaller lr" in str(hot)
    assert hot.kinetic.verdict == "hot"
    cold = temperature(chain(bl.SGNHT(samples=40), epochs=60, lr=0.05), DATA)
    assert cold.verdict == "cold"
    assert "too narrow" in str(cold)
    assert cold.kinetic.verdict == "right"
    assert "; kinetic" in str(cold)
    assert temperature(chain(bl.SGLD(samples=4), epochs=4, lr=1e-3), DATA).kinetic is None


@pytest.mark.parametrize(
    ("sampler", "target"), [(StochasticHamiltonian, 1.0), (StochasticHamiltonian, 0.25), (Thermostat, 1.0)]
)
@pytest.mark.parametrize("lr", [0.05, 0.5])
def test_the_kinetic_temperature_on_an_exact_gaussian(sampler, target, lr):
    """Momentum with friction α has 1 / (1 − lr λ / (4 − 2α)) of the temperature; a thermostat takes that away."""
    torch.manual_seed(0)
    curvature = torch.tensor([0.3, 1.0, 2.0]).double()
    weights = torch.zeros(4000, 3).double().requires_grad_()
    optimizer = sampler([weights], lr=lr, num_data=100, friction=0.1, temperature=target)
    (group,) = optimizer.param_groups
    found = []
    for step in range(600):
        weights.grad = weights.detach() * curvature
        optimizer.step()
        found += [optimizer.kinetic_temperature(group)] if step >= 200 else []
    expected = target * float((1 / (1 - lr * curvature / 3.8)).mean()) if sampler is StochasticHamiltonian else target
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.01)


def test_a_few_networks_are_not_judged_beyond_their_error():
    assert Temperature(1.5, 0.4, 1.0).verdict == "right"
    assert Temperature(1.5, 0.1, 1.0).verdict == "hot"
    assert Temperature(0.5, 0.1, 1.0).verdict == "cold"
    assert Temperature(0.5, 0.1, 0.5).verdict == "right"


def test_a_subset_counts_its_own_weights_alone():
    """The fixed layer has 30 of 42 weights: counted too, it would make a temperature of 0.29."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2, bias=False)).double()
    method = bl.HMC(samples=80, warmup=40, leapfrog=10, subset="last-layer")
    bnn = bl.bayesianize(model, method, likelihood=Gaussian(1.0))
    data = [(X, TARGETS[:, :2])]
    bnn.fit(data, seed=1, progress=False)
    assert temperature(bnn, data).value == pytest.approx(1.0, rel=0.35)


def test_what_has_no_temperature():
    bnn = bl.bayesianize(nn.Linear(4, 1), bl.Variational(), likelihood=Gaussian(1.0), num_data=200)
    with pytest.raises(UnsupportedModel, match="that of a chain"):
        temperature(bnn, DATA)
    with pytest.raises(BayeslimError, match="at least two networks"):
        temperature(chain(bl.SGLD(samples=1), epochs=2, lr=1e-3), DATA)
