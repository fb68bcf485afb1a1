"""Stein variational gradient descent: its direction by a double loop, moments of known posteriors, any network."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import UnsupportedModel
from bayeslim.methods.shared.particle_stack import ParticleStack
from bayeslim.methods.svgd import descent, kernel
from oracles import linear_regression

N = 40
X = torch.randn(N, 2, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 0.5])
Y = X @ torch.tensor([[1.0], [-2.0]]) + 0.5 * torch.randn(N, 1, generator=torch.Generator().manual_seed(2))


def linear(method: bl.Method) -> bl.Bayesian:
    likelihood = bl.likelihoods.Gaussian(noise=0.5)
    return bl.bayesianize(nn.Linear(2, 1, bias=False), method, likelihood=likelihood)


def fitted(method: bl.Method, epochs: int = 250, batch_size: int = N, **options) -> torch.Tensor:
    bnn = linear(method)
    loader = bl.data.Loader(X, Y, batch_size=batch_size)
    bnn.fit(loader, epochs=epochs, lr=0.05, lr_schedule="cosine", seed=3, progress=False, **options)
    return bnn.posterior_.values["weight"].flatten(1)


def exact() -> tuple[torch.Tensor, torch.Tensor]:
    mean, covariance, _ = linear_regression(X, Y[:, 0], noise=0.5, prior_precision=1.0)
    return mean, covariance


def test_the_direction_is_that_of_a_double_loop():
    points, gradients = (torch.randn(5, 3, dtype=torch.float64) for _ in range(2))
    pairs = [(points[i] - points[j]).norm().square() for i in range(5) for j in range(5) if i != j]
    h = torch.stack(pairs).median() / math.log(5)

    def k(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.exp(-(a - b).square().sum() / h)

    expected = []
    for i in range(5):
        phi = torch.zeros(3, dtype=torch.float64)
        for j in range(5):
            log_density_gradient = -10 * gradients[j]  # the loss is −log p / N
            phi += k(points[j], points[i]) * log_density_gradient
            phi += torch.func.grad(k)(points[j], points[i])
        expected.append(-phi / 5 / 10)
    found, closeness = descent(points, gradients, 10)
    torch.testing.assert_close(found, torch.stack(expected))
    torch.testing.assert_close(closeness, kernel(points)[0].mean(1))


def test_one_point_alone_follows_its_gradient_and_points_in_one_place_do_not_break():
    gradients = torch.randn(1, 3)
    torch.testing.assert_close(descent(torch.randn(1, 3), gradients, 10)[0], gradients)
    same = torch.ones(4, 3)
    torch.testing.assert_close(descent(same, torch.ones(4, 3), 10)[0], torch.ones(4, 3))


@pytest.mark.parametrize("function_space", [False, True])
def test_one_particle_is_the_most_probable_network(function_space):
    mean, _ = exact()
    found = fitted(bl.SVGD(particles=1, function_space=function_space))
    torch.testing.assert_close(found[0], mean, atol=2e-3, rtol=0)


def test_moments_come_closer_with_more_particles():
    mean, covariance = exact()
    errors = []
    for particles in (3, 60):
        found = fitted(bl.SVGD(particles=particles))
        torch.testing.assert_close(found.mean(0), mean, atol=0.03, rtol=0)
        root = torch.linalg.cholesky(covariance)
        white = torch.linalg.solve_triangular(root, found.T.cov(correction=0), upper=False)
        white = torch.linalg.solve_triangular(root, white.T, upper=False)
        errors.append(float((white - torch.eye(2)).norm()))
    assert errors[1] < 0.25
    assert errors[1] < 0.5 * errors[0]


def test_minibatches_count_as_the_whole_data():
    mean, covariance = exact()
    found = fitted(bl.SVGD(particles=40), epochs=75, batch_size=10)
    torch.testing.assert_close(found.mean(0), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(found.var(0), covariance.diag(), rtol=0.4, atol=0)


def test_function_space_has_the_posterior_of_a_linear_network():
    mean, covariance = exact()
    found = fitted(bl.SVGD(particles=40, function_space=True))
    torch.testing.assert_close(found.mean(0), mean, atol=0.03, rtol=0)
    spread = (X @ found.T).var(1)
    expected = ((X @ covariance) * X).sum(1)
    ratio = (spread.sum() / expected.sum()).item()
    assert 0.7 < ratio < 1.3


def test_particles_that_do_not_see_each_other_are_trained_as_one_alone():
    """A kernel of no width leaves every particle its own gradient, over n, which Adam does not mind."""

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1)).double()

    starts = [network() for _ in range(2)]
    made = iter(starts)
    likelihood = bl.likelihoods.Gaussian(0.5)
    bnn = bl.bayesianize(network(), bl.SVGD(particles=2, bandwidth=1e-12), likelihood=likelihood)
    loader = bl.data.Loader(X.double(), Y.double(), batch_size=N)
    bnn.fit(loader, epochs=20, lr=0.01, start=lambda: next(made), progress=False)
    for k, model in enumerate(starts):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            decay = sum(p.square().sum() for p in model.parameters()) / 2
            nll = (model(X.double()) - Y.double()).square().mean() / (2 * 0.5**2)
            (nll + decay / N).backward()
            optimizer.step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(bnn.posterior_.particle(k)[name], p.detach(), rtol=1e-5, atol=1e-6)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(12, 2)
        self.again = nn.Linear(12, 2)
        self.again.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.head(h) + self.again(h)


@pytest.mark.parametrize("together", [False, True])
def test_a_stack_is_its_networks(together):
    torch.manual_seed(0)
    models = [Convolutional().train() for _ in range(3)]
    names = dict(models[0].named_parameters())
    states = [{n: v.clone() for n, v in m.state_dict().items() if n in names or "norm." in n} for m in models]
    stack = ParticleStack(models[0], states).train()
    stack.together = together
    x = torch.randn(4, 1, 4, 4)
    expected = torch.stack([model(x) for model in models])
    torch.testing.assert_close(stack(x), expected)
    found = stack.tensors()
    for k, model in enumerate(models):
        torch.testing.assert_close(found["norm.running_mean"][k], model.norm.running_mean)
    stack(x).square().sum().backward()
    models[1].norm.load_state_dict({n: v[1] for n, v in found.items() if n.startswith("norm.")}, strict=False)
    models[1](x).square().sum().backward()
    own = stack.get_parameter(stack.path_of("head.weight")).grad[1]
    torch.testing.assert_close(own, models[1].head.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function_space", [False, True])
def test_any_network_trains_resumes_and_learns_its_noise(function_space, tmp_path):
    x, y = torch.randn(24, 1, 4, 4), torch.randn(24, 2)
    method = bl.SVGD(particles=3, function_space=function_space)

    def bayesian() -> bl.Bayesian:
        torch.manual_seed(0)
        return bl.bayesianize(Convolutional(), method, likelihood=bl.likelihoods.Gaussian("learned"))

    def factory(parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.5)

    options = {"epochs": 4, "optimizer": factory, "seed": 1, "progress": False}
    # tied weights have no start of their own, so one is made
    options["start"] = Convolutional
    whole = bayesian()
    before = {name: value.clone() for name, value in whole.likelihood.state_dict().items()}
    result = whole.fit(bl.data.Loader(x, y, batch_size=8), **options)
    assert result.history[-1]["nll"] < result.history[0]["nll"]
    assert any(not torch.equal(before[name], value) for name, value in whole.likelihood.state_dict().items())
    assert whole.posterior_.count == 3
    assert bl.predict(whole, x).samples.shape == (3, 24, 2)
    assert (whole.step, whole.num_data) == (12, 24)

    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.number == 3:
            raise Stop

    with pytest.raises(Stop):
        bayesian().fit(bl.data.Loader(x, y, batch_size=8), checkpoint=tmp_path, callbacks=[stop], **options)
    again = bayesian()
    again.fit(bl.data.Loader(x, y, batch_size=8), checkpoint=tmp_path, **options)
    first, second = whole.posterior_.tensors(), again.posterior_.tensors()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_pruned_stack_keeps_its_zeros_and_goes_on_from_where_it_was():
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    bnn = bl.bayesianize(model, bl.SVGD(particles=3), likelihood=bl.likelihoods.Gaussian(0.5))
    loader = bl.data.Loader(X, Y, batch_size=20)
    bnn.fit(loader, epochs=2, progress=False)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), criterion="snr")
    start = {name: value.clone() for name, value in pruned.posterior_.values.items()}
    pruned.fit(loader, epochs=1, lr=1e-6, progress=False)
    for name, mask in pruned.masks.items():
        assert (pruned.posterior_.values[name][:, ~mask] == 0).all()
    for name, value in pruned.posterior_.values.items():
        torch.testing.assert_close(value, start[name], atol=1e-4, rtol=0)


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="particles must be"):
        bl.SVGD(particles=0)
    with pytest.raises(ValueError, match="bandwidth must be"):
        bl.SVGD(bandwidth=0.0)
    bnn, loader = linear(bl.SVGD(particles=2)), bl.data.Loader(X, Y, batch_size=20)
    with pytest.raises(TypeError, match="a function that makes an optimizer"):
        bnn.fit(loader, optimizer=torch.optim.SGD(bnn.parameters(), lr=0.1))

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    other = bl.bayesianize(Own(), bl.SVGD(particles=2), likelihood=bl.likelihoods.Gaussian(0.5))
    with pytest.raises(UnsupportedModel, match="draw new random weights"):
        other.fit(loader)


@pytest.mark.parametrize("width", [4, 400])  # a stack under one vmap, and networks one after the other
def test_validation_is_of_all_particles_together(width):
    y = (X[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.Linear(width, 2))
    bnn = bl.bayesianize(model, bl.SVGD(particles=3), likelihood=bl.likelihoods.Categorical())
    loader = bl.data.Loader(X, y, batch_size=20)
    result = bnn.fit(loader, epochs=2, validate=loader, seed=0, progress=False)
    probs = bl.predict(bnn, X).probs
    nll = -probs[torch.arange(N), y].log().mean()
    assert result.history[-1]["val_nll"] == pytest.approx(float(nll), rel=1e-4)
    assert result.history[-1]["val_error"] == pytest.approx(float((probs.argmax(-1) != y).float().mean()))


def test_patience_goes_back_to_the_best_particles():
    bnn = linear(bl.SVGD(particles=3))
    seen = []

    def spoil(epoch):
        seen.append(epoch.bnn.model.tensors()["weight"].clone())
        epoch.metrics["val_nll"] = float(epoch.number)  # the first is best

    loader = bl.data.Loader(X, Y, batch_size=N)
    result = bnn.fit(loader, epochs=9, lr=0.1, validate=loader, patience=2, callbacks=[spoil], seed=0, progress=False)
    assert (result.stopped, len(result.history)) == ("early stopping", 3)
    assert torch.equal(bnn.posterior_.values["weight"], seen[0])


def test_few_particles_are_narrower_than_the_posterior_as_documented():
    """20 particles in 8 dimensions have about a third of the variance."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 8, generator=generator).double()
    y = x.sum(1, keepdim=True) + torch.randn(200, 1, generator=generator).double()
    exact = torch.linalg.inv(x.T @ x + torch.eye(8)).diagonal()
    bnn = bl.bayesianize(nn.Linear(8, 1, bias=False).double(), bl.SVGD(20), likelihood=bl.likelihoods.Gaussian(1.0))
    bnn.fit([(x, y)], epochs=250, lr=0.02, seed=0, progress=False)
    share = (bnn.posterior_.values["weight"][:, 0].var(0) / exact).mean()
    assert 0.25 < share < 0.45
