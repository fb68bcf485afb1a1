"""The noisy layers' own pieces: a linear layer as one step, and μ and σ² handed over instead of computed again."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import bayeslim as bl
from bayeslim import stochastic


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_a_cut_weight_has_no_spread_and_no_gradient(estimator):
    bnn = bl.bayesianize(
        nn.Linear(2, 1, bias=False), bl.Variational(estimator=estimator), likelihood=bl.likelihoods.Gaussian(1.0)
    )
    bnn(torch.rand(3, 2))
    log_std = bnn.model.get_parameter("weight_log_std")
    log_std.data.copy_(torch.tensor([[0.5, -torch.inf]]))
    _, spread = bnn.model.mean_and_spread("weight")
    power = 2 if estimator == "local" else 1
    torch.testing.assert_close(spread, torch.tensor([[math.exp(0.5 * power), 0.0]]))
    spread.sum().backward()
    torch.testing.assert_close(log_std.grad, torch.tensor([[power * math.exp(0.5 * power), 0.0]]))


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_as_one_step_and_its_derivatives(bias):
    torch.manual_seed(0)
    shapes = [(4, 3), (2, 3), (2, 3), (2,)]
    x, weight, variance, b = (torch.rand(shape, dtype=torch.float64).add(0.1).requires_grad_() for shape in shapes)
    values = (x, weight, variance, b) if bias else (x, weight, variance)

    def layer(x, weight, variance, b=None):
        torch.manual_seed(1)
        return stochastic._LocalLinear.apply(x, weight, variance, b)

    torch.manual_seed(1)
    noise = torch.randn(4, 2, dtype=torch.float64)
    expected = x @ weight.T + (b if bias else 0) + (x.square() @ variance.T).sqrt() * noise
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


def test_a_convolution_that_rounds_to_below_zero_has_a_spread(monkeypatch):
    """As those by transforms do, which torch uses where oneDNN is off."""
    torch.manual_seed(0)
    bnn = bl.bayesianize(
        nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)),
        bl.Variational(estimator="local"),
        likelihood=bl.likelihoods.Categorical(),
        num_data=10,
    )
    x = torch.rand(4, 1, 3, 3) * (torch.rand(4, 1, 1, 1) > 0.5)  # of nothing there is no spread
    convolve = torch.conv2d
    monkeypatch.setattr(nn.functional, "conv2d", lambda *args: convolve(*args) - 1e-9)
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    loss = bnn.loss((x, torch.tensor([0, 1, 0, 1])))
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in bnn.parameters())
    assert bl.predict(bnn, x, how="local", samples=2).probs.isfinite().all()


@pytest.mark.parametrize("sites", ["weights", "all"])
def test_a_known_variance_changes_nothing_and_is_forgotten(sites):
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
        return {
            n: (model.get_parameter(n), scale * (2 * model.get_parameter(f"{n}_log_std")).exp())
            for n in bnn.sites.names
        }

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
    wrong = outputs_and_gradients(values(1e6))
    assert wrong[0].abs().max() > 2 * outputs_and_gradients(None)[0].abs().max()


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_a_network_converted_to_bfloat16_draws(estimator):
    network = nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten(), nn.Linear(6, 3))
    method = bl.Variational(estimator=estimator)
    bnn = bl.bayesianize(network, method, likelihood=bl.likelihoods.Categorical(), num_data=4)
    x, y = torch.rand(4, 2, 2), torch.arange(4) % 3
    bnn(x)
    bnn.to(torch.bfloat16)  # log σ too
    x = x.bfloat16()
    assert bnn(x).isfinite().all()
    assert bnn.loss((x, y)).isfinite()
    assert bl.fgsm(bnn, x, y, 0.1, samples=2).dtype == torch.bfloat16
