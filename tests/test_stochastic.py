"""The noisy layers' own pieces: a whole linear layer as one step, and μ and σ handed over instead of computed again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import bayeslim as bl
from bayeslim import stochastic


@pytest.mark.parametrize("is_log", [False, True])
def test_std_and_its_derivatives(is_log):
    spread = torch.linspace(0.1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()

    def std(spread):
        return stochastic._Std.apply(spread, is_log).square()

    assert torch.allclose(std(spread), (2 * spread).exp() if is_log else spread.square())
    assert gradcheck(std, spread)
    assert gradgradcheck(std, spread)


def test_a_cut_weight_has_no_variance_and_no_gradient():
    log_std = torch.tensor([0.0, -torch.inf], requires_grad=True)
    stochastic._Std.apply(log_std, True).square().sum().backward()
    assert log_std.grad.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_as_one_step_and_its_derivatives(bias):
    torch.manual_seed(0)
    shapes = [(4, 3), (2, 3), (2, 3), (2,)]
    x, weight, std, b = (torch.rand(shape, dtype=torch.float64).add(0.1).requires_grad_() for shape in shapes)
    values = (x, weight, std, b) if bias else (x, weight, std)

    def layer(x, weight, std, b=None):
        torch.manual_seed(1)
        return stochastic._LocalLinear.apply(x, weight, std, b)

    torch.manual_seed(1)
    noise = torch.randn(4, 2, dtype=torch.float64)
    expected = x @ weight.T + (b if bias else 0) + (x.square() @ std.square().T).sqrt() * noise
    torch.testing.assert_close(layer(*values), expected)
    assert gradcheck(layer, values)
    assert gradgradcheck(layer, values)


def test_one_step_and_many_draw_the_same():
    torch.manual_seed(0)
    bnn = bl.bayesianize(nn.Linear(5, 3), bl.Variational(estimator="local"), likelihood=bl.likelihoods.Categorical())
    x = torch.rand(2, 4, 5)
    bnn(x)
    layer = bnn.model

    def outputs_and_gradients():
        torch.manual_seed(1)
        with stochastic.noise(layer, on=True):
            outputs = layer(x)
        return [outputs, *torch.autograd.grad(outputs.square().sum(), list(layer.parameters()))]

    one = outputs_and_gradients()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stochastic, "_is_simple", lambda *_: False)
        many = outputs_and_gradients()
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b)


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

    def values(scale=1.0):
        model = bnn.model
        return {n: (model.get_parameter(n), scale * model.get_parameter(f"{n}_log_std").exp()) for n in bnn.sites.names}

    def outputs_and_gradients(given):
        torch.manual_seed(1)
        with stochastic.noise(bnn.model, on=True, given=given):
            outputs = bnn.model(x)
        gradients = torch.autograd.grad(outputs.square().sum(), list(bnn.model.parameters()))
        return [outputs, *gradients]

    for given, computed in zip(outputs_and_gradients(values()), outputs_and_gradients(None), strict=True):
        assert torch.allclose(given, computed, rtol=1e-5)
    assert any(stochastic.is_noisy(layer) for layer in bnn.model)
    assert not any(layer.given for layer in bnn.model if stochastic.is_noisy(layer))
    # a wrong one would show
    wrong = outputs_and_gradients(values(1e3))
    assert wrong[0].abs().max() > 2 * outputs_and_gradients(None)[0].abs().max()
