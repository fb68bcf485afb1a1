"""Bits that weights deserve: against the capacity of a Gaussian channel, and for every kind of posterior."""

import math

import pytest
import torch
from torch import nn

import bayeslim as bl


def fitted(structure: str) -> bl.Bayesian:
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    likelihood, prior = bl.likelihoods.Gaussian(0.5), bl.priors.Normal(1.0)
    model = nn.Linear(3, 2).double()
    bnn = bl.bayesianize(model, bl.Laplace(structure, curvature="exact"), likelihood=likelihood, prior=prior)
    bnn.fit([(x.double(), torch.randn(64, 2).double())], progress=False)
    return bnn


def test_bits_of_a_diagonal_posterior_are_those_of_its_signal_to_noise() -> None:
    bnn = fitted("diag")
    posterior = bnn.posterior_
    for name, bits in bl.deserved_bits(bnn).items():
        ratio = (posterior.mean[name] / posterior.std[name]).square()
        torch.testing.assert_close(bits, 0.5 * torch.log2(1 + ratio))


def test_correlated_weights_count_given_the_others() -> None:
    bnn = fitted("full")
    precision = torch.diagonal(bnn.posterior_.precision)
    bits = torch.cat([b.flatten() for b in bl.deserved_bits(bnn).values()])
    mean = torch.cat([m.flatten() for m in bnn.posterior_.mean.values()])
    torch.testing.assert_close(bits, 0.5 * torch.log2(1 + mean.square() * precision))


def test_units_and_layers_are_means() -> None:
    bnn = fitted("diag")
    weights, units, layers = (bl.deserved_bits(bnn, per)["weight"] for per in ("weight", "unit", "layer"))
    torch.testing.assert_close(units, weights.mean(1))
    torch.testing.assert_close(layers, weights.mean())


def test_what_was_cut_deserves_none_and_a_wrong_group_is_refused() -> None:
    bnn = fitted("diag")
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), criterion="magnitude")
    cut = ~pruned.masks["weight"]
    bits = bl.deserved_bits(pruned)["weight"]
    assert (bits[cut] == 0).all()
    assert (bits[~cut] > 0).all()
    assert not math.isnan(float(bits.sum()))
    with pytest.raises(ValueError, match='"weight", "unit" or "layer"'):
        bl.deserved_bits(bnn, "channel")
