"""IVON: its step against the paper's own recursion, the mean-field optimum, everything a variational method can do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import BayeslimWarning
from bayeslim.methods.ivon import POINT_RATE, NaturalGradient
from bayeslim.noise import standard_normals_like
from oracles import linear_regression

N = 40
X = torch.randn(N, 2, generator=torch.Generator().manual_seed(1)) @ torch.tensor([[1.0, 0.8], [0.0, 0.6]])
Y = X @ torch.tensor([[1.0], [-2.0]]) + 0.5 * torch.randn(N, 1, generator=torch.Generator().manual_seed(2))


def linear(method: bl.Method, **options) -> bl.Bayesian:
    torch.manual_seed(0)
    likelihood = bl.likelihoods.Gaussian(noise=0.5)
    return bl.bayesianize(nn.Linear(2, 1, bias=False), method, likelihood=likelihood, num_data=N, **options)


def test_steps_are_those_of_the_paper():
    """Algorithm 1 with β₁ = 0, written with its own Hessian h and weight decay δ, on the same draws."""
    bnn = linear(bl.IVON(momentum=0.0, memory=0.9, curvature=2.0), prior=bl.priors.Normal(0.7))
    optimizer = bnn.optimizer(lr=0.05)
    delta = 1 / (0.7**2 * N)
    m = bnn.model.weight.detach().clone().double()
    h = torch.full_like(m, 2.0 / 0.5**2 - delta)  # the loss of noise 1/2 is four times as steep
    for step in range(6):
        torch.manual_seed(step)
        optimizer.zero_grad()
        bnn.loss((X, Y)).backward()
        optimizer.step()
        torch.manual_seed(step)
        noise = standard_normals_like({"weight": bnn.model.weight}, ["weight"])["weight"].double()
        sigma = 1 / (N * (h + delta)).sqrt()
        theta = (m + sigma * noise).requires_grad_()
        nll = -bnn.likelihood.log_prob(X.double() @ theta.T, Y.double()).mean()
        (g,) = torch.autograd.grad(nll, theta)
        hessian = g * (theta.detach() - m) / sigma.square()
        m = m - 0.05 * 2.0 * (g + delta * m) / (h + delta)
        h = 0.9 * h + 0.1 * hessian + 0.5 * 0.1**2 * (h - hessian).square() / (h + delta)
        torch.testing.assert_close(bnn.model.weight.detach().double(), m, rtol=1e-4, atol=1e-5)
        std = bnn.posterior_.std["weight"].double()
        torch.testing.assert_close(std, 1 / (N * (h + delta)).sqrt(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("estimator", "batch_size"), [("shared", N), ("local", 10)])
def test_the_optimum_is_the_mean_field_posterior(estimator, batch_size):
    mean, covariance, _ = linear_regression(X, Y[:, 0], noise=0.5, prior_precision=1.0)
    precision = torch.linalg.inv(covariance)
    bnn = linear(bl.IVON(memory=0.99, estimator=estimator, samples=4))
    loader = bl.data.Loader(X, Y, batch_size=batch_size)
    epochs = 480 * batch_size // N
    bnn.fit(loader, epochs=epochs, lr=0.2, lr_schedule="linear", seed=0, progress=False)
    q = bnn.posterior_
    torch.testing.assert_close(q.mean["weight"][0], mean, atol=0.02, rtol=0)
    ratio = q.variance["weight"][0] * precision.diag()
    assert ((ratio - 1).abs() < 0.25).all()
    # the marginals of the posterior itself are much wider, so the two cannot be taken for each other
    assert (covariance.diag() * precision.diag() > 1.7).all()


def test_points_are_trained_by_adam():
    means, log_stds = [nn.Parameter(torch.zeros(2))], [nn.Parameter(torch.zeros(2))]
    point, twin = (nn.Parameter(torch.ones(3)) for _ in range(2))
    own = NaturalGradient(means, log_stds, [point], 0.1, num_data=10, curvature=1.0, betas=(0.9, 0.999))
    adam = torch.optim.Adam([twin], lr=POINT_RATE * 0.1)
    for step in range(5):
        for p, optimizer in ((point, own), (twin, adam)):
            p.grad = torch.tensor([1.0, -2.0, 0.5]) * math.cos(step)
            optimizer.step()
    torch.testing.assert_close(point, twin)
    assert torch.equal(means[0], torch.zeros(2))


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_spread_stays_finite_whatever_the_gradient(sign):
    means, log_stds = [nn.Parameter(torch.zeros(2))], [nn.Parameter(torch.zeros(2))]
    optimizer = NaturalGradient(means, log_stds, [], 0.1, num_data=1000, curvature=1.0, betas=(0.9, 0.9))
    for _ in range(20):
        means[0].grad, log_stds[0].grad = torch.zeros(2), torch.full((2,), sign * 1e3)
        optimizer.step()
    assert torch.isfinite(log_stds[0]).all()


def test_a_rare_example_does_not_throw_its_weight_off():
    """A weight that no example has read for 2,000 steps moves as far as at the start when one does."""
    bnn = linear(bl.IVON(momentum=0.0))
    optimizer = bnn.optimizer(lr=0.1)
    mean, log_std = (p for group in optimizer.param_groups for p in group["params"])

    def move(gradient: float) -> float:
        before = mean.detach().clone()
        mean.grad = torch.full_like(mean, gradient)
        log_std.grad = -1 / N * torch.ones_like(mean)  # (û − u) σ² with û = 0
        optimizer.step()
        return float((mean.detach() - before).abs().max())

    first = move(1e-3)
    for _ in range(2_000):
        move(0.0)
    assert move(1e-3) < 1.1 * first


def test_spreads_start_from_the_curvature_and_only_once():
    bnn = linear(bl.IVON(curvature=4.0))
    bnn.optimizer()
    torch.testing.assert_close(bnn.posterior_.std["weight"], torch.full((1, 2), 1 / math.sqrt(4.0 / 0.5**2 * N)))
    bnn.fit(bl.data.Loader(X, Y, batch_size=20), epochs=1, progress=False)
    before = bnn.posterior_.std["weight"]
    bnn.optimizer()
    assert torch.equal(bnn.posterior_.std["weight"], before)


@pytest.mark.filterwarnings("error::bayeslim.errors.BayeslimWarning")
def test_training_much_shorter_than_the_memory_is_announced():
    loader = bl.data.Loader(X, Y, batch_size=20)
    with pytest.warns(BayeslimWarning, match=r"still near their start: .* 100000 steps, and training had \d+. Use"):
        linear(bl.IVON()).fit(loader, epochs=1, progress=False)
    linear(bl.IVON(memory=0.9)).fit(loader, epochs=1, progress=False)


@pytest.mark.parametrize("prior", [bl.priors.Laplace(0.5), bl.priors.ScaleMixture(0.5, 1.0, 0.1)])
def test_other_priors_are_as_good(prior):
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    bnn = bl.bayesianize(model, bl.IVON(), likelihood=bl.likelihoods.Gaussian("learned"), prior=prior)
    noise = bnn.likelihood.log_noise.item()
    result = bnn.fit(bl.data.Loader(X, Y, batch_size=20), epochs=30, lr=0.02, seed=0, progress=False)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert bnn.likelihood.log_noise.item() != noise


def test_resume_is_exact_and_zeros_stay(tmp_path):
    def bayesian() -> bl.Bayesian:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
        return bl.bayesianize(model, bl.IVON(), likelihood=bl.likelihoods.Gaussian(0.5))

    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.number == 3:
            raise Stop

    options = {"epochs": 4, "seed": 1, "progress": False}
    loader = bl.data.Loader(X, Y, batch_size=20)
    whole = bayesian()
    whole.fit(bl.data.Loader(X, Y, batch_size=20), **options)
    with pytest.raises(Stop):
        bayesian().fit(bl.data.Loader(X, Y, batch_size=20), checkpoint=tmp_path, callbacks=[stop], **options)
    again = bayesian()
    again.fit(bl.data.Loader(X, Y, batch_size=20), checkpoint=tmp_path, **options)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())
    pruned = bl.prune(whole, bl.Budget(sparsity=0.5))
    pruned.fit(loader, epochs=2, progress=False)
    for name, mask in pruned.masks.items():
        assert (pruned.posterior_.sample()[name][~mask] == 0).all()
        assert torch.isfinite(pruned.posterior_.mean[name]).all()


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="independent Gaussians"):
        bl.IVON(family=bl.families.LowRankGaussian(rank=2))
    with pytest.raises(ValueError, match="memory must be"):
        bl.IVON(memory=1.0)
    with pytest.raises(ValueError, match="curvature must be"):
        bl.IVON(curvature=0.0)
    bnn = linear(bl.IVON())
    with pytest.raises(TypeError, match="IVON is itself an optimizer"):
        bnn.fit(bl.data.Loader(X, Y, batch_size=20), optimizer=torch.optim.SGD(bnn.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="lr must be positive"):
        bnn.optimizer(lr=0.0)
