"""Hamiltonian chains that run side by side are those that run alone."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from targets import worst
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.errors import BayeslimError, NonFiniteLoss
from bayeslim.likelihoods import Categorical, Gaussian
from bayeslim.methods.shared.chains_abreast import answered_together
from bayeslim.methods.shared.hamiltonian import hamiltonian_chain, hamiltonian_monte_carlo
from bayeslim.noise import RandomStream
from bayeslim.posteriors.particles import tensors_of
from bayeslim.priors import Normal
from bayeslim.train.seeding import seed_of_chain
from oracles import linear_regression

X = torch.randn(22, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
VALUES = X.sum(1, keepdim=True).sin()
PRIORS = [Normal(1.0), Normal(0.3), Normal(2.0)]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()


def some(method: bl.Method, priors=PRIORS, make=network, likelihood=None) -> list[bl.Bayesian]:
    torch.manual_seed(0)
    likelihood = Gaussian(0.5) if likelihood is None else likelihood
    return [bl.bayesianize(make(), method, likelihood=likelihood, prior=prior) for prior in priors]


def loader(x=X, y=VALUES, batch_size=12, **options) -> bl.data.Loader:
    return bl.data.Loader(x, y, batch_size, shuffle=False, **options)  # the last batch has ten


def assert_same(together: list[bl.Bayesian], alone: list[bl.Bayesian], result: bl.Fit, data, **options) -> None:
    """Fit each network by itself, and compare everything that it is then with what it is already."""
    chains = together[0].method.chains
    for place, (one, other) in enumerate(zip(together, alone, strict=True)):
        own = data[place] if isinstance(data, list) else data
        found = other.fit(own, seed=seed_of_chain(5, place * chains), progress=False, **options)
        assert (one.step, one.num_data) == (other.step, other.num_data)
        assert one.posterior_.chains == other.posterior_.chains == found.details["chains"] == result.details["chains"]
        for fact in ("acceptance", "divergences", "step_size", "energies"):
            torch.testing.assert_close(result.details[fact][place], found.details[fact], rtol=1e-5, atol=1e-5)
        for name, tensor in tensors_of(other).items():
            torch.testing.assert_close(tensors_of(one)[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
        for part in ("values", "buffers"):
            own, its = getattr(one.posterior_, part), getattr(other.posterior_, part)
            assert list(own) == list(its)
            for name, tensor in its.items():
                torch.testing.assert_close(own[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


RUNS = {
    "plain": (bl.HMC(4, 22, 4), {}),
    "cold": (bl.HMC(4, 5, 5, temperature=0.5), {"dtype": torch.float32}),
    "chains": (bl.HMC(4, 12, 4, chains=2), {"start": network}),
    "trained chains": (bl.HMC(3, 5, 4, chains=2), {"epochs": 2, "lr": 0.01}),
    "last layer": (bl.HMC(4, 5, 4, chains=2, subset="last-layer"), {"epochs": 1}),
    "subnetwork": (bl.HMC(4, 5, 4, subset=bl.Subnetwork(5)), {}),
}


@pytest.mark.parametrize("kind", RUNS)
def test_every_network_has_the_draws_it_has_alone(kind):
    method, options = RUNS[kind]
    together = some(method, likelihood=Gaussian("learned", initial_noise=0.5))
    alone = copy.deepcopy(together)
    result = bl.fit_together(together, loader(), seed=5, progress=False, **options)
    assert_same(together, alone, result, loader(), **options)
    every = torch.cat([next(iter(bnn.posterior_.values.values())).flatten(1) for bnn in together])
    assert kind == "subnetwork" or float(torch.pdist(every).max()) > 1e-3


def test_every_network_has_the_draws_of_its_own_data():
    data = [loader(), loader(X.flip(0) * 2, VALUES), loader(X + 1, VALUES)]
    together = some(bl.HMC(3, 8, 4, chains=2))
    alone = copy.deepcopy(together)
    result = bl.fit_together(together, data, seed=5, progress=False)
    assert_same(together, alone, result, data)


def test_the_draws_do_not_depend_on_numbers_that_a_loader_draws():
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, VALUES), 12, shuffle=True)
    together = some(bl.HMC(3, 4, 4))
    alone = copy.deepcopy(together)
    result = bl.fit_together(together, data, seed=5, progress=False)
    assert_same(together, alone, result, data)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the generator of a GPU")
def test_every_network_has_the_draws_it_has_alone_on_a_gpu():
    together = [bnn.to("cuda") for bnn in some(bl.HMC(4, 12, 4, chains=2))]
    alone = copy.deepcopy(together)
    before = torch.cuda.get_rng_state()
    result = bl.fit_together(together, loader(device="cuda"), seed=5, progress=False)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert_same(together, alone, result, loader(device="cuda"))


def test_posteriors_of_linear_regressions_are_exact():
    """Rows with the same targets are as many regressions; each network has its own data and prior."""
    rows, generator = 40, torch.Generator().manual_seed(2)
    inputs = [X, 3 * X + 1, X.flip(0) - 0.5]
    values = [x @ torch.tensor([1.0, -0.5]).double() + torch.randn(22, generator=generator).double() for x in inputs]
    networks = some(
        bl.HMC(samples=80, warmup=80, leapfrog=10), PRIORS, lambda: nn.Linear(2, rows, bias=False).double(),
        Gaussian(1.0),
    )  # fmt: skip
    data = [loader(x, y[:, None].expand(-1, rows).contiguous(), 22) for x, y in zip(inputs, values, strict=True)]
    bl.fit_together(networks, data, seed=3, progress=False)
    exact = [linear_regression(x, y, 1.0, p.std**-2)[:2] for x, y, p in zip(inputs, values, PRIORS, strict=True)]
    for place, bnn in enumerate(networks):
        found = bnn.posterior_.values["weight"][::8].flatten(0, 1)
        assert worst(found, *exact[place]) < 4.5
        assert worst(found, *exact[place - 1]) > 6
        assert worst(found, exact[place][0], exact[place][1] * 1.6) > 4.5


def gaussian(scale: float):
    """The potential of a Gaussian, of vectors (..., D)."""
    return lambda q: (q / scale).square().sum(-1) / 2, lambda q: q / scale**2


SCALES = (0.01, 1.0, 30.0)


def test_chains_are_bit_for_bit_those_that_run_alone():
    settings = {"samples": 20, "warmup": 20, "leapfrog": 7}  # too short to set masses
    starts = [scale * torch.ones(4, dtype=torch.float64) for scale in SCALES]
    alone, streams = [], []
    for place, (scale, start) in enumerate(zip(SCALES, starts, strict=True)):
        energy, gradient = gaussian(scale)
        torch.manual_seed(place)
        streams.append(RandomStream(start.device))
        alone.append(hamiltonian_monte_carlo(lambda q, e=energy, g=gradient: (float(e(q)), g(q)), start, **settings))

    def potentials(vectors: Tensor) -> tuple[list[float], Tensor]:
        pairs = [(*gaussian(scale), q) for scale, q in zip(SCALES, vectors, strict=True)]
        return [float(energy(q)) for energy, _, q in pairs], torch.stack([gradient(q) for _, gradient, q in pairs])

    torch.manual_seed(9)
    before = torch.get_rng_state()
    together = answered_together([hamiltonian_chain(start, **settings) for start in starts], potentials, streams)
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one.draws, other.draws)
        assert one.energies == other.energies
        assert one.step_size == other.step_size
    small, middle, large = (walk.step_size for walk in together)
    assert 30 < middle / small < 300
    assert 10 < large / middle < 100


def test_a_seed_repeats_the_draws_and_leaves_the_global_state():
    def draws(**options) -> Tensor:
        networks = some(bl.HMC(3, 4, 3, chains=2))
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        bl.fit_together(networks, loader(), progress=False, **options)
        if "seed" in options:
            assert torch.equal(torch.get_rng_state(), before[0])
            assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # noqa: NPY002
        return torch.stack([bnn.posterior_.values["0.weight"] for bnn in networks])

    assert torch.equal(draws(seed=1), draws(seed=1))
    assert not torch.equal(draws(seed=1), draws(seed=2))
    assert not torch.equal(draws(seed=1), draws())


def test_a_bad_start_is_named_and_nothing_is_changed():
    networks = some(bl.HMC(2, 2, 2, chains=2))
    bl.fit_together(networks, loader(), seed=1, progress=False)
    with torch.no_grad():
        networks[1].model[0].weight[0, 0] = torch.nan
    posteriors = [bnn.posterior_ for bnn in networks]
    before = [copy.deepcopy(tensors_of(bnn)) for bnn in networks]
    with pytest.raises(NonFiniteLoss, match="Chain 0 of network 1 needs a start of finite density"):
        bl.fit_together(networks, loader(), seed=1, progress=False)
    for bnn, posterior, own in zip(networks, posteriors, before, strict=True):
        assert bnn.posterior_ is posterior
        for name, tensor in tensors_of(bnn).items():
            torch.testing.assert_close(tensor, own[name], rtol=0, atol=0, equal_nan=True)


def test_each_network_needs_labels():
    labels = torch.zeros(22, dtype=torch.long)
    networks = some(bl.HMC(2, 2, 2), PRIORS[:2], lambda: nn.Linear(2, 2).double(), Categorical())
    with pytest.raises(BayeslimError, match="All targets are -100"):
        bl.fit_together(networks, [loader(y=labels), loader(y=labels - 100)], progress=False)


def test_options_of_training_need_epochs():
    with pytest.raises(TypeError, match="lr are options of training"):
        bl.fit_together(some(bl.HMC(2, 2, 2)), loader(), lr=0.1, progress=False)
