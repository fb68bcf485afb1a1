"""The summary of chains of networks."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.diagnostics import ess, r_hat, summaries, summary, to_arviz
from bayeslim.errors import BayeslimError, MissingExtra, ShapeMismatch
from bayeslim.posteriors import Particles

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
CHAINS, DRAWS = 3, 40


def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def particles(chains: int = CHAINS) -> Particles:
    g = torch.Generator().manual_seed(2)
    shapes = {name: p.shape for name, p in network().named_parameters()}
    values = {n: torch.randn(CHAINS * DRAWS, *s, generator=g, dtype=torch.float64) for n, s in shapes.items()}
    return Particles(values, chains=chains)


def sampled(likelihood: bl.likelihoods.Likelihood) -> bl.Bayesian:
    bnn = bl.bayesianize(network(), bl.SGLD(), likelihood=likelihood, num_data=10)
    bnn.method.keep(bnn, particles())
    return bnn


def test_every_scalar_is_judged():
    found = summary(particles())
    assert (found.chains, found.draws) == (CHAINS, DRAWS)
    assert list(found.by_name) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    values = particles().values["0.weight"].view(CHAINS, DRAWS, -1)
    assert torch.equal(found.by_name["0.weight"].ess_bulk, ess(values))
    assert torch.equal(found.by_name["0.weight"].r_hat, r_hat(values))
    assert found.weights.changing == 26
    worst = min(scores.worst["ess_tail"] for scores in found.by_name.values())
    assert found.weights.worst["ess_tail"] == worst
    assert found.weights.worst["r_hat"] >= found.weights.median["r_hat"]
    assert found.outputs is None
    assert found.e_bfmi is None


def test_chains_are_told_or_known():
    assert summary(particles(chains=1), chains=CHAINS).weights.worst == summary(particles()).weights.worst
    assert summary(particles(chains=1)).draws == CHAINS * DRAWS
    with pytest.raises(ShapeMismatch, match="120 networks do not come from 7"):
        summary(particles(), chains=7)


@pytest.mark.parametrize("likelihood", [bl.likelihoods.Categorical(), bl.likelihoods.Gaussian("heteroscedastic")])
def test_function_space_is_what_networks_predict(likelihood):
    bnn = sampled(likelihood)
    found = summary(bnn, X).outputs
    draws = bl.predict(bnn, X, samples=CHAINS * DRAWS).samples
    means = draws.softmax(-1) if likelihood.name == "categorical" else draws[..., :1]
    expected = ess(means.reshape(CHAINS, DRAWS, -1))
    assert torch.allclose(found.ess_bulk, expected)


def test_permuted_units_disagree_in_weights_and_agree_in_function():
    base = {n: p.detach() for n, p in network().named_parameters()}
    order = torch.tensor([2, 0, 3, 1])
    turned = {"0.weight": base["0.weight"][order], "0.bias": base["0.bias"][order]}
    turned |= {"2.weight": base["2.weight"][:, order], "2.bias": base["2.bias"]}
    g = torch.Generator().manual_seed(3)
    values = {
        n: torch.cat([v + 0.01 * torch.randn(50, *v.shape, generator=g) for v in (base[n], turned[n])]) for n in base
    }
    bnn = sampled(bl.likelihoods.Categorical())
    bnn.method.keep(bnn, Particles(values, chains=2))
    found = summary(bnn, X)
    assert found.weights.worst["r_hat"] > 1.5
    assert found.outputs.worst["r_hat"] < 1.1


def test_cut_weights_are_left_out():
    mask = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) > 0.5
    pruned = particles().condition({"0.weight": mask})
    assert pruned.chains == CHAINS
    found = summary(pruned)
    assert found.by_name["0.weight"].changing == int(mask.sum())
    assert not any(value != value for value in found.weights.median.values())
    gone = summary(particles().condition({"2.bias": torch.zeros(2, dtype=torch.bool)}))
    assert gone.by_name["2.bias"].worst["r_hat"] != gone.by_name["2.bias"].worst["r_hat"]


def test_large_parameters_are_judged_at_places_evenly_spread(monkeypatch):
    monkeypatch.setattr(summaries, "MAX_WEIGHTS_PER_PARAMETER", 5)
    values = particles().values["0.weight"].view(CHAINS, DRAWS, -1)
    found = summary(particles()).by_name["0.weight"]
    assert torch.equal(found.ess_bulk, ess(values[..., [0, 2, 4, 7, 9]]))


def test_it_prints_a_table():
    text = repr(summary(sampled(bl.likelihoods.Categorical()), X, energy=torch.randn(CHAINS, DRAWS)))
    lines = text.splitlines()
    assert lines[0] == "Diagnostics of 3 chains of 40 draws"
    assert [line.split()[0] for line in lines[3:]] == [
        "0.weight", "0.bias", "2.weight", "2.bias", "weights", "outputs", "E-BFMI",
    ]  # fmt: skip
    assert all(len(line) <= 100 for line in lines)


def test_samplers_say_how_many_chains(tmp_path):
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    loader = bl.data.Loader(x, y, batch_size=10)
    bnn = bl.bayesianize(network(), bl.SGLD(samples=6, chains=2), likelihood=bl.likelihoods.Categorical())
    bnn.fit(loader, epochs=6, lr=1e-3, seed=0, progress=False)
    found = summary(bnn, x)
    assert (found.chains, found.draws) == (2, 6)
    bl.save(bnn, tmp_path)
    again = summary(bl.load(tmp_path, model=network()), x)
    assert again.chains == 2
    assert again.outputs.worst == found.outputs.worst


def test_energies_of_hamiltonian_chains():
    x = torch.randn(20, 3)
    loader = bl.data.Loader(x, (x[:, 0] > 0).long(), batch_size=20)
    bnn = bl.bayesianize(network(), bl.HMC(samples=10, warmup=10, chains=2), likelihood=bl.likelihoods.Categorical())
    fit = bnn.fit(loader, seed=0, progress=False)
    found = summary(bnn, energy=fit.details["energies"])
    assert found.e_bfmi.shape == (2,)
    assert (found.e_bfmi > 0).all()
    with pytest.raises(ShapeMismatch, match=r"Energies must be \(2, 10\)"):
        summary(bnn, energy=[[1.0, 2.0]])


def test_without_arviz_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(MissingExtra, match=r"pip install 'bayeslim\[diagnostics\]'"):
        to_arviz(particles())


def test_what_has_no_chains_is_said():
    bnn = bl.bayesianize(network(), bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=10)
    with pytest.raises(BayeslimError, match=r"need chains of networks. Got a Diagonal posterior"):
        summary(bnn)
    with pytest.raises(TypeError, match="a Bayesian network or Particles"):
        summary(network())
    with pytest.raises(TypeError, match="pass the Bayesian network with x"):
        summary(particles(), X)
    with pytest.raises(ShapeMismatch, match="at least 4 draws"):
        summary(particles(), chains=60)
    with pytest.raises(ShapeMismatch, match="do not come from 7 equally long chains"):
        Particles(particles().values, chains=7)
