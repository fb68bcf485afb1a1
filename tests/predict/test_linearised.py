"""Output covariances in closed form against materialised Jacobians."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl
import oracles
from bayeslim.curvature.sweep import evaluation_replica
from bayeslim.errors import UnsupportedModel
from bayeslim.posteriors import Conditioned, Dense, Gaussian, Kronecker
from bayeslim.predict import linearised


class Residual(nn.Module):
    """Convolutions with groups and stride, both norms, a residual, and a weight used at many positions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2, stride=1, bias=False)
        self.mix = nn.Linear(4, 4)
        self.layer_norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        h = (h + torch.tanh(self.second(h))).flatten(2).transpose(1, 2)
        return self.head(self.layer_norm(h + torch.tanh(self.mix(h))).mean(1))


class Recurrent(nn.Module):
    """Parameters that no hook can tell."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lstm(x)[0]
        return self.head(self.attention(h, h, h, need_weights=False)[0].mean(1))


class Sequence(nn.Module):
    """An output for every position."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)))


class Wide(nn.Sequential):
    """More outputs than columns that are sent backwards at once."""

    def __init__(self):
        super().__init__(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 40))


def _network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    if name == "residual":
        model = Residual().double()
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2)
        return model, torch.randn(5, 2, 4, 4).double()
    if name == "transposed":
        model = nn.Sequential(
            nn.ConvTranspose1d(2, 3, 3, stride=2), nn.Tanh(), nn.Conv1d(3, 2, 2, dilation=2), nn.Flatten()
        )
        return model.double(), torch.randn(4, 2, 3).double()
    if name == "sequence":
        return Sequence().double(), torch.randint(7, (4, 3))
    if name == "wide":
        return Wide().double(), torch.randn(3, 3).double()
    return Recurrent().double(), torch.randn(3, 4, 3).double()


NETWORKS = ("residual", "transposed", "sequence", "wide", "recurrent")


def _fitted(model: nn.Module, x: Tensor, method: bl.Laplace, **options) -> bl.Bayesian:
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(0.5), prior=bl.priors.Normal(0.7), **options)
    targets = torch.randn_like(model.eval()(x))
    bnn.fit([(x, targets)], progress=False)
    return bnn


def dense_covariance(posterior: Gaussian) -> Tensor:
    """P⁻¹ column by column."""
    names = list(posterior.mean)
    sizes = [posterior.mean[n].numel() for n in names]
    eye = torch.eye(sum(sizes), dtype=torch.float64)
    parts = {n: p.reshape(-1, *posterior.mean[n].shape) for n, p in zip(names, eye.split(sizes, 1), strict=True)}
    image = posterior.covariance_product(parts)
    return torch.cat([image[n].flatten(1) for n in names], 1)


def expected(model: nn.Module, x: Tensor, posterior: Gaussian) -> Tensor:
    J = oracles.jacobian(model, x, list(posterior.mean))
    return J @ dense_covariance(posterior) @ J.mT


def found(bnn: bl.Bayesian, x: Tensor) -> tuple[Tensor, Tensor]:
    parts = list(linearised.output_gaussians(evaluation_replica(bnn.model, x), bnn.posterior_, [x]))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


@pytest.mark.parametrize("structure", ["kron", "diag", "full", "lowrank"])
@pytest.mark.parametrize("name", NETWORKS)
def test_covariance_of_the_outputs_is_that_of_the_jacobian(name, structure):
    model, x = _network(name)
    bnn = _fitted(model, x, bl.Laplace(structure, rank=20))
    outputs, covariance = found(bnn, x)
    torch.testing.assert_close(outputs, bnn.model.eval()(x))
    torch.testing.assert_close(covariance, expected(bnn.model, x, bnn.posterior_), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {"corrected": True},
        {"damping": "sqrt"},
        {"sharing": "reduce"},
        {"unsupported": "point"},
        {"structure": "diag", "subset": ("head", "norm", "first.bias")},
        {"structure": "full", "subset": "last-layer"},
        {"structure": "full", "subset": "mix"},
        {"structure": "kron", "subset": "second"},
        {"subset": bl.Subnetwork(30, "random")},
    ],
    ids=str,
)
def test_covariance_with_other_settings(options):
    model, x = _network("residual")
    bnn = _fitted(model, x, bl.Laplace(**options))
    _, covariance = found(bnn, x)
    torch.testing.assert_close(covariance, expected(bnn.model, x, bnn.posterior_), rtol=1e-8, atol=1e-10)


def test_covariance_under_priors_that_differ_between_parameters():
    model, x = _network("residual")
    prior = {"head.bias": bl.priors.Normal(3.0), "mix": bl.priors.Normal(0.2), "all": bl.priors.Normal(0.7)}
    bnn = bl.bayesianize(model, bl.Laplace(), likelihood=bl.likelihoods.Gaussian(0.5), prior=prior)
    bnn.fit([(x, torch.randn(5, 3).double())], progress=False)
    _, covariance = found(bnn, x)
    torch.testing.assert_close(covariance, expected(bnn.model, x, bnn.posterior_), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("structure", ["diag", "full", "lowrank"])
def test_covariance_of_a_pruned_posterior(structure):
    model, x = _network("residual")
    bnn = _fitted(model, x, bl.Laplace(structure, rank=20))
    masks = {n: torch.rand_like(p) > 0.4 for n, p in bnn.posterior_.mean.items() if p.ndim > 1}
    bnn.method.condition(bnn, masks)
    assert isinstance(bnn.posterior_, Conditioned)
    _, covariance = found(bnn, x)
    torch.testing.assert_close(covariance, expected(bnn.model, x, bnn.posterior_), rtol=1e-8, atol=1e-10)


def test_draws_of_the_linearised_network_have_its_moments():
    model, x = _network("residual")
    bnn = _fitted(model, x, bl.Laplace())
    masks = {n: torch.rand_like(p) > 0.4 for n, p in bnn.posterior_.mean.items() if p.ndim > 1}
    bnn.method.condition(bnn, masks, tolerance=1e-8)
    posterior = bnn.posterior_
    assert not linearised.has_closed_form(posterior)
    draws = linearised.linearised_draws(evaluation_replica(bnn.model, x), posterior, lambda: [x[:2], x[2:]], 300)
    torch.testing.assert_close(draws.mean(0), bnn.model.eval()(x))
    exact = expected(bnn.model, x, posterior)
    empirical = torch.einsum("sbi,sbj->bij", draws - draws.mean(0), draws - draws.mean(0)) / len(draws)
    scale = exact.diagonal(dim1=1, dim2=2).sqrt()
    error = (empirical - exact) / (scale[:, :, None] * scale[:, None, :])
    assert error.abs().max() < 6 * math.sqrt(2 / 150)


def test_draws_where_an_operation_has_no_forward_derivative():
    model, x = _network("recurrent")
    bnn = _fitted(model, x, bl.Laplace("diag"))
    generator = torch.Generator().manual_seed(0)
    draws = linearised.linearised_draws(evaluation_replica(bnn.model, x), bnn.posterior_, lambda: [x], 200, generator)
    exact = expected(bnn.model, x, bnn.posterior_).diagonal(dim1=1, dim2=2)
    ratio = draws.var(0, correction=0) / exact
    assert (ratio - 1).abs().max() < 6 * math.sqrt(2 / 100)


@pytest.mark.parametrize("inplace", [False, True])
def test_draws_of_a_network_with_hard_sigmoids(inplace):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Hardsigmoid(inplace), nn.Linear(4, 2)), torch.randn(5, 3)
    bnn = _fitted(model, x, bl.Laplace("diag"))
    draws = linearised.linearised_draws(evaluation_replica(bnn.model, x), bnn.posterior_, lambda: [x], 200)
    torch.testing.assert_close(draws.mean(0), bnn.model.eval()(x))
    exact = expected(bnn.model, x, bnn.posterior_).diagonal(dim1=1, dim2=2)
    assert (draws.var(0, correction=0) / exact - 1).abs().max() < 6 * math.sqrt(2 / 100)


class Distances(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.weight)


def test_operations_that_have_first_derivatives_only_are_refused_with_the_remedy():
    model, x = Distances(3, 4), torch.randn(5, 3)
    bnn = _fitted(model, x, bl.Laplace("diag"))
    with pytest.raises(UnsupportedModel, match=r'cdist_backward.*how="sample"'):
        linearised.linearised_draws(evaluation_replica(bnn.model, x), bnn.posterior_, lambda: [x], 2)


def test_memory_is_bounded_by_few_examples_at_a_time(monkeypatch):
    model, x = _network("residual")
    bnn = _fitted(model, x, bl.Laplace())
    _, whole = found(bnn, x)
    monkeypatch.setattr(linearised, "CPU_GRADIENT_BYTES", 1)
    parts = list(linearised.output_gaussians(evaluation_replica(bnn.model, x), bnn.posterior_, [x]))
    assert len(parts) == len(x)
    torch.testing.assert_close(torch.cat([c for _, c in parts]), whole)


def test_the_last_layers_covariance_needs_no_jacobian(monkeypatch):
    model, x = _network("residual")
    bnn = _fitted(model, x, bl.Laplace("full", "last-layer"))
    assert isinstance(bnn.posterior_, Dense)
    expected_covariance = expected(bnn.model, x, bnn.posterior_)
    monkeypatch.delattr(linearised, "GradientRows")
    torch.testing.assert_close(found(bnn, x)[1], expected_covariance)


def test_kronecker_and_diagonal_covariances_need_no_jacobian(monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    x = torch.randn(4, 1, 4, 4).double()
    for structure in ("kron", "diag"):
        bnn = _fitted(model, x, bl.Laplace(structure))
        assert isinstance(bnn.posterior_, Kronecker)
        exact = expected(bnn.model, x, bnn.posterior_)
        with monkeypatch.context() as patch:
            patch.delattr(linearised, "GradientRows")
            torch.testing.assert_close(found(bnn, x)[1], exact)


class Encoder(nn.Module):
    """A transformer's encoder, whose fused path reads its weights without calling its layers."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


@pytest.mark.parametrize("name", ["residual", "recurrent", "encoder"])
def test_threads_predict_at_once_and_touch_nothing(name):
    model, x = (Encoder().double(), torch.randn(4, 3, 4).double()) if name == "encoder" else _network(name)
    bnn = _fitted(model, x, bl.Laplace())
    bnn.train()
    state, random = copy.deepcopy(bnn.model.state_dict()), torch.get_rng_state()
    modes = [module.training for module in bnn.model.modules()]

    def predict(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            draws = linearised.linearised_draws(
                evaluation_replica(bnn.model, x), bnn.posterior_, lambda: [x[:2], x[2:]], 4, generator
            )
        return [draws, *found(bnn, x)]

    serial = [predict(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        parallel = list(pool.map(predict, range(8)))
    for one, other in zip(serial, parallel, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert [module.training for module in bnn.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[key]) for key, value in bnn.model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in bnn.model.modules())


@pytest.mark.parametrize("structure", ["kron", "full", "lowrank"])
@pytest.mark.parametrize("how", ["auto", "joint"])
def test_inputs_made_under_inference_mode_are_predicted(structure: str, how: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    bnn = bl.bayesianize(network, bl.Laplace(structure), likelihood=bl.likelihoods.Categorical())
    bnn.fit([(x, torch.arange(8) % 2)], progress=False)
    wanted = bl.predict(bnn, 2 * x, 4, how, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = bl.predict(bnn, 2 * x, 4, how, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.probs, wanted.probs)
