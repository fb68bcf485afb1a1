"""Promises that several methods share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.distill.targets import _one_draw
from bayeslim.errors import BayeslimError, UnsupportedModel
from bayeslim.export.ensemble import ensemble

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def network(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), *between, nn.ReLU(), nn.Linear(8, 2))


def fitted(model: nn.Module, method: bl.Method, epochs: int = 4, x: torch.Tensor = X, **options: object) -> bl.Bayesian:
    torch.manual_seed(0)
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical())
    bnn.fit(bl.data.Loader(x, Y, 16), epochs=epochs, seed=0, progress=False, **options)
    return bnn.eval()


@pytest.mark.parametrize(
    "method", [bl.DeepEnsemble(3), bl.DeepEnsemble(3, together=False), bl.SVGD(3), bl.SGLD(chains=2, samples=2)]
)
def test_a_frozen_layer_stays_when_networks_are_made_anew(method):
    model = network()
    model[0].requires_grad_(False)
    bnn = fitted(model, method, start=network)
    assert torch.equal(bnn.model[0].weight, model[0].weight)
    assert torch.equal(bnn.model[0].bias, model[0].bias)


@pytest.mark.parametrize("method", [bl.SGLD(samples=5), bl.SGHMC(samples=5)])
def test_a_chain_with_batch_norms_stands_at_a_network_with_its_own_statistics(method):
    bnn = fitted(network(nn.BatchNorm1d(8)), method, lr=0.1)
    torch.testing.assert_close(bnn(X), bl.predict(bnn, X).samples[-1])


def test_zeros_have_their_places_so_pruned_networks_are_not_aligned():
    bnn = fitted(network(), bl.DeepEnsemble(2))
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
    with pytest.raises(BayeslimError, match="Align before you prune"):
        bl.align(pruned, X[:4])


@pytest.mark.parametrize("method", [bl.MCDropout(), bl.MCAugmentation(noise=0.5)])
def test_noise_beside_the_weights_is_not_exported_as_networks(method):
    bnn = fitted(network(nn.Dropout(0.5)), method)
    with pytest.raises(UnsupportedModel, match="mean_network"):
        ensemble(bnn, 5)


def test_swag_with_batch_norms_teaches_and_exports_the_networks_it_measured():
    bnn = fitted(network(nn.BatchNorm1d(8)), bl.SWAG(samples=6, start=0.25, rate=1.0), epochs=8, lr=0.05)
    every = bl.predict(bnn, X).samples
    torch.manual_seed(0)
    drawn = torch.stack([_one_draw(bnn, X).samples[0] for _ in range(20)])
    nearest = (drawn[:, None] - every).abs().amax((2, 3)).min(1)
    assert nearest.values.max() < 1e-5
    assert len(nearest.indices.unique()) > 2
    exported = torch.stack([member(X) for member in ensemble(bnn, 6).members])
    torch.testing.assert_close(exported, every)


@pytest.mark.parametrize("rank", [0, 4])
def test_swag_predicts_with_a_half_precision_network(rank):
    bnn = fitted(network().bfloat16(), bl.SWAG(rank=rank, start=0.25), epochs=8, x=X.bfloat16())
    assert bl.predict(bnn, X.bfloat16()).samples.isfinite().all()
    assert bnn.train()(X.bfloat16()).dtype == torch.bfloat16
