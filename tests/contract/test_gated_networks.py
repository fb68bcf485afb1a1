"""Gates in networks of other packages: noise per example and in whole weights agree."""

from __future__ import annotations

import copy

import pytest
import torch
from foreign_networks import CASES, Case, check_recomputed_gradients
from test_foreign_networks import double
from torch import Tensor, nn

import bayeslim as bl
from bayeslim import families, gates
from bayeslim.errors import NoSiteMatched
from bayeslim.types import call

STD = 1e-3
GATED = [
    "linear-on-sequences", "mlp", "batchnorm", "conv-deep", "embedding", "lstm", "lstm-projected", "gru", "packed",
    "cells", "attention", "cross-attention", "transformer", "tied", "used-twice", "two-names", "read-by-parent",
    "run-and-read", "subclass", "frozen-body", "dict", "weight-norm",
]  # fmt: skip


def gated(case: Case, estimator: str, std: float = STD) -> tuple[nn.Module, bl.Bayesian, object]:
    plain, inputs = case.build().double(), double(case.inputs())
    method = bl.Variational(families.Point(), gates=gates.NormalJeffreys(initial_std=std), estimator=estimator)
    likelihood = bl.likelihoods.Gaussian(noise=1.0)
    return plain, bl.bayesianize(plain, method, likelihood=likelihood, sites=case.sites, num_data=10), inputs


def linearised_variance(plain: nn.Module, bnn: bl.Bayesian, inputs) -> tuple[Tensor, Tensor]:
    """The outputs, and Σ (∂f/∂z)² σ² over all gates, by multiplying z into whole weights."""
    places = bnn.state["places"]

    def outputs(*scales: Tensor) -> Tensor:
        weights = {}
        for place, z in zip(places, scales, strict=True):
            for part in place.parts:
                weight = weights.get(part.parameter, plain.get_parameter(part.parameter).detach())
                weights[part.parameter] = weight * place.along(z, part, weight.ndim)
        return call(copy.deepcopy(plain), inputs, weights)

    ones = tuple(torch.ones(place.count, dtype=torch.float64) for place in places)
    value = outputs(*ones)
    slopes = torch.autograd.functional.jacobian(outputs, ones)
    return value, sum(slope.reshape(*value.shape, -1).square().sum(-1) for slope in slopes) * STD**2


WHOLE = ["mlp", "batchnorm", "conv-deep", "packed", "transformer", "tied"]  # elsewhere nothing is drawn at layers


@pytest.mark.parametrize(
    ("name", "estimator"), [(name, "local") for name in GATED] + [(name, "shared") for name in WHOLE]
)
def test_spread_of_draws_is_that_of_whole_scales(name, estimator):
    plain, bnn, inputs = gated(CASES[name], estimator)
    expected, variance = linearised_variance(plain, bnn, inputs)
    with torch.no_grad():
        draws = torch.stack([bnn(inputs) for _ in range(150)])
    assert draws.var(0).sum().item() == pytest.approx(variance.sum().item(), rel=0.35)
    assert ((draws.mean(0) - expected).abs() <= 5 * (variance / 150).sqrt() + 30 * STD**2).all()
    bnn.loss((inputs, torch.randn_like(expected)), kl_weight=0.0).backward()
    for place in bnn.state["places"]:
        gradient = bnn.model.get_parameter(place.parameter("log_std")).grad
        assert torch.isfinite(gradient).all(), place
        assert gradient.abs().sum() > 0, place
    bnn.eval()
    torch.testing.assert_close(bnn(inputs), call(bnn.mean_network().eval(), inputs))


def test_flipout_has_scales_for_every_example_too():
    plain, bnn, inputs = gated(CASES["mlp"], "flipout")
    _, variance = linearised_variance(plain, bnn, inputs)
    with torch.no_grad():
        draws = torch.stack([bnn(inputs) for _ in range(150)])
    assert draws.var(0).sum().item() == pytest.approx(variance.sum().item(), rel=0.35)


def test_whatever_has_no_such_layer_says_so():
    for name in ("bilinear", "embedding-bag", "spectral-norm", "conv2d"):
        with pytest.raises(NoSiteMatched, match="has no layer to gate"):
            gated(CASES[name], "local")


def test_recomputed_activations_see_the_same_scales(monkeypatch):
    method = bl.Variational(gates=gates.NormalJeffreys(initial_std=0.3))
    check_recomputed_gradients(method, monkeypatch)
