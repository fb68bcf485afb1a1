"""Aligning particles: permutations are undone, functions stay, assignments are the best there are."""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import nn

import bayeslim as bl
from bayeslim.compact.alike import Alike
from bayeslim.errors import UnsupportedModel
from bayeslim.methods.shared.particle_method import ParticleMethod, gathered, snapshot
from bayeslim.prune.assignment import best_assignment

alignment = importlib.import_module("bayeslim.prune.align")  # the name in the package is the function's


@dataclass(frozen=True)
class Given(ParticleMethod):
    """A method whose particles a test puts in."""

    name: ClassVar[str] = "given"


def given_networks(networks: list[nn.Module], likelihood=None) -> bl.Bayesian:
    likelihood = bl.likelihoods.Categorical() if likelihood is None else likelihood
    bnn = bl.bayesianize(networks[0], Given(), likelihood=likelihood, num_data=10)
    snapshots = []
    for network in networks:
        bnn.model.load_state_dict(network.state_dict())
        snapshots.append(snapshot(bnn))
    bnn.method.keep(bnn, gathered(snapshots))
    return bnn.eval()


@given(st.integers(1, 30), st.integers(0, 2**31), st.booleans())
@settings(max_examples=20, deadline=None)
def test_assignments_are_as_good_as_scipys(n, seed, with_ties):
    gains = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gains = gains.round() if with_ties else gains
    order = best_assignment(gains)
    assert sorted(order) == list(range(n))
    rows, columns = linear_sum_assignment(gains.numpy(), maximize=True)
    assert gains[torch.arange(n), order].sum().item() == pytest.approx(gains.numpy()[rows, columns].sum())


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


def permuted(network: nn.Module, seed: int) -> nn.Module:
    """The same function with hidden units in another order, done by hand."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    if isinstance(network[0], nn.Linear):
        steps = [(["0.weight", "0.bias"], "2.weight", 1), (["2.weight", "2.bias", "3.*"], "5.weight", 1)]
    else:
        steps = [(["0.weight", "0.bias", "1.*"], "3.weight", 1), (["3.weight", "3.bias"], "6.weight", 4)]
    for made, reads, block in steps:
        size = state[made[0]].shape[0]
        order = torch.randperm(size, generator=generator)
        for name in made:
            names = [n for n in state if n.startswith(name[:-1])] if name.endswith("*") else [name]
            for n in names:
                if state[n].ndim:
                    state[n] = state[n][order]
        columns = state[reads].unflatten(1, (size, block))[:, order].flatten(1, 2)
        state[reads] = columns
    other = copy.deepcopy(network)
    other.load_state_dict(state)
    return other.eval()


CASES = {"dense": (dense, torch.randn(5, 4)), "convolutional": (convolutional, torch.randn(5, 1, 6, 6))}


@pytest.mark.parametrize("case", CASES)
def test_a_permutation_is_undone(case):
    build, x = CASES[case]
    torch.manual_seed(0)
    network = build()
    network.train()(torch.randn(64, *x.shape[1:]))  # statistics for the norms
    network.eval()
    networks = [network, permuted(network, 1), permuted(network, 2)]
    for other in networks[1:]:
        torch.testing.assert_close(other(x), network(x))
        assert not torch.equal(other[0].weight, network[0].weight)
    bnn = given_networks(networks)
    before = bl.predict(bnn, x).samples
    aligned = bl.align(bnn, x)
    q = aligned.posterior_
    for name, value in (q.values | q.buffers).items():
        assert torch.equal(value[1], value[0]), name
        assert torch.equal(value[2], value[0]), name
    torch.testing.assert_close(bl.predict(aligned, x).samples, before)
    assert not torch.equal(bnn.posterior_.values["0.weight"][1], q.values["0.weight"][1])  # the given one is untouched


def test_aligned_ensembles_are_closer_and_say_the_same():
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    bnn = bl.bayesianize(
        nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2)),
        bl.DeepEnsemble(3),
        likelihood=bl.likelihoods.Categorical(),
    )
    bnn.fit(bl.data.Loader(x, y, 50), epochs=30, lr=0.02, seed=0, progress=False)
    aligned = bl.align(bnn, x[:2])
    torch.testing.assert_close(bl.predict(aligned, x).samples, bl.predict(bnn, x).samples, rtol=1e-4, atol=1e-5)
    spread = [sum(v.sum() for v in one.posterior_.variance.values()) for one in (bnn, aligned)]
    assert spread[1] < 0.9 * spread[0]
    last = bl.predict(bnn, x).samples[-1]
    torch.testing.assert_close(aligned.eval()(x), last, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(aligned.mean_network()(x), last, rtol=1e-4, atol=1e-5)


def test_the_mean_of_aligned_networks_stands_for_them_where_asked_for(tmp_path):
    torch.manual_seed(1)
    networks = [dense().eval() for _ in range(3)]
    for network in networks:
        network.train()(torch.randn(64, 4))
    x = torch.randn(5, 4)
    aligned = bl.align(given_networks(networks), x, average=True)
    q = aligned.posterior_
    mean = torch.func.functional_call(networks[0].eval(), q.mean | q.mean_buffers, (x,))
    torch.testing.assert_close(aligned.eval()(x), mean)
    torch.testing.assert_close(bl.predict(aligned, x, how="mean").samples[0], mean)
    assert bl.posteriors.Particles.restore(q.config(), q.tensors()).averaged


def test_what_is_frozen_stays_where_it_is():
    network = dense()
    network[2].requires_grad_(False)
    bnn = bl.bayesianize(network, bl.DeepEnsemble(2), likelihood=bl.likelihoods.Categorical())
    x = torch.randn(20, 4)
    bnn.fit(bl.data.Loader(x, torch.arange(20) % 3, 10), epochs=1, progress=False)
    before = bl.predict(bnn, x).samples
    torch.testing.assert_close(bl.predict(bl.align(bnn, x), x).samples, before)


class Ordered(nn.Module):
    """Hidden units that are not alike: each is weighed by its place, which is no parameter."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.a(x)
        return self.b(h * torch.linspace(0, 1, h.shape[1], dtype=h.dtype))


def test_units_that_are_not_alike_stay_where_they_are():
    torch.manual_seed(0)
    bnn = given_networks([Ordered(), Ordered()])
    aligned = bl.align(bnn, torch.randn(3, 4))
    assert all(torch.equal(aligned.posterior_.values[n], v) for n, v in bnn.posterior_.values.items())


def test_particles_that_would_answer_otherwise_are_noticed(monkeypatch):
    torch.manual_seed(0)
    bnn = given_networks([dense(), dense()])
    before = bnn.posterior_.values["0.weight"].clone()
    own = Alike({("0.weight", 0): torch.arange(9)[:, None]}, frozenset())  # not its readers
    half = alignment._Layer(own, frozenset({"0.weight"}))
    monkeypatch.setattr(alignment, "_layers", lambda *_: [half])
    with pytest.raises(UnsupportedModel, match="cannot be aligned"):
        bl.align(bnn, torch.randn(3, 4))
    assert torch.equal(bnn.posterior_.values["0.weight"], before)


def test_only_particles_can_be_aligned():
    bnn = bl.bayesianize(nn.Linear(3, 2), bl.Variational(), likelihood=bl.likelihoods.Categorical())
    with pytest.raises(TypeError, match="Got variational"):
        bl.align(bnn, torch.randn(2, 3))
