"""The noisy layers' own pieces: the variance of a weight, and σ handed over instead of computed again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import bayeslim as bl
from bayeslim import stochastic


@pytest.mark.parametrize("known", [False, True])
def test_variance_and_its_derivatives(known):
    log_std = torch.linspace(-3, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()

    def variance(log_std):
        return stochastic._Variance.apply(log_std, log_std.detach().exp() if known else None)

    assert torch.allclose(variance(log_std), (2 * log_std).exp())
    assert gradcheck(variance, log_std)
    assert gradgradcheck(variance, log_std)


def test_a_cut_weight_has_no_variance_and_no_gradient():
    log_std = torch.tensor([0.0, -torch.inf], requires_grad=True)
    stochastic._Variance.apply(log_std, None).sum().backward()
    assert log_std.grad.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("sites", ["weights", "all"])
def test_a_known_std_changes_nothing_and_is_forgotten(sites):
    torch.manual_seed(0)
    bnn = bl.bayesianize(
        nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(27, 2)),
        bl.Variational(estimator="local"),
        likelihood=bl.likelihoods.Categorical(),
        sites=sites,
        num_data=10,
    )
    x = torch.rand(5, 1, 4, 4)
    bnn(x)  # the first call finds the layers that can be noisy
    stds = {name: bnn.model.get_parameter(f"{name}_log_std").exp() for name in bnn.sites.names}

    def outputs_and_gradients(stds):
        torch.manual_seed(1)
        with stochastic.noise(bnn.model, on=True, stds=stds):
            outputs = bnn.model(x)
        gradients = torch.autograd.grad(outputs.square().sum(), list(bnn.model.parameters()))
        return [outputs, *gradients]

    for given, computed in zip(outputs_and_gradients(stds), outputs_and_gradients(None), strict=True):
        assert torch.allclose(given, computed, rtol=1e-5)
    assert any(stochastic.is_noisy(layer) for layer in bnn.model)
    assert all(layer.known_weight_std is None for layer in bnn.model if stochastic.is_noisy(layer))
    # a wrong one would show
    wrong = outputs_and_gradients({name: 1e3 * std for name, std in stds.items()})
    assert wrong[0].abs().max() > 2 * outputs_and_gradients(None)[0].abs().max()
