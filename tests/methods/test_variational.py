"""Mean-field variational inference against exact linear regression, and its gradient estimators against each other."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl
from bayeslim import likelihoods, priors, stochastic
from bayeslim.errors import BayeslimWarning
from bayeslim.likelihoods import Categorical, Gaussian
from bayeslim.methods import variational
from bayeslim.types import call
from oracles import gaussian_kl, linear_regression

NOISE, PRIOR_STD, N, D = 0.5, 1.5, 30, 4


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated inputs, so that the exact posterior is not diagonal."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(D, D, generator=generator, dtype=torch.float64)
    X = torch.randn(N, D, generator=generator, dtype=torch.float64) @ mixing * 0.5
    return X, X @ torch.randn(D, generator=generator).double() + NOISE * torch.randn(N, generator=generator).double()


def regression(method: bl.Variational, std: float | torch.Tensor = 0.1) -> bl.Bayesian:
    bnn = bl.bayesianize(
        nn.Linear(D, 1, bias=False).double(),
        method,
        likelihood=likelihoods.Gaussian(NOISE),
        prior=priors.Normal(PRIOR_STD),
        num_data=N,
    )
    set_std(bnn, std)
    return bnn


def set_std(bnn: bl.Bayesian, std: float | torch.Tensor) -> None:
    for name in bnn.sites.names:
        log_std = bnn.method.family.log_std(bnn.model, name)
        log_std.data.copy_(torch.as_tensor(std).log().expand_as(log_std))


def exact_elbo(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """E_q[log p(y|w)] − KL(q ‖ p) of a diagonal q, in closed form."""
    X, y = problem()
    errors = (y - X @ mean).square() + X.square() @ variance
    data_term = -0.5 * errors.sum() / NOISE**2 - N * math.log(NOISE) - 0.5 * N * math.log(2 * math.pi)
    scale = PRIOR_STD**2
    return data_term - 0.5 * ((mean.square() + variance) / scale - 1 - (variance / scale).log()).sum()


def gradients(bnn: bl.Bayesian, batch, draws: int, kl_weight: float | None = None) -> torch.Tensor:
    """Gradients of the loss in every trainable parameter, (draws, P)."""
    params = list(bnn.parameters())
    rows = [torch.autograd.grad(bnn.loss(batch, kl_weight=kl_weight), params) for _ in range(draws)]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])


class SigmaPoints:
    """√D eᵢ in turn: in mirrored pairs a noise with mean zero and covariance the identity exactly, over 2D draws."""

    def __init__(self):
        self.axes = itertools.cycle(range(D))

    def __call__(self, tensors: dict[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
        (name,) = names
        noise = torch.zeros_like(tensors[name])
        noise.view(-1)[next(self.axes)] = math.sqrt(D)
        return {name: noise}


def test_the_exact_optimum_is_the_objectives(monkeypatch):
    """With noise that integrates quadratics exactly, the means of the exact posterior and variances 1/Λᵢᵢ are optimal.

    The objective is strictly convex in μ and log σ here, so its one stationary point is its optimum.
    """
    monkeypatch.setattr(variational, "standard_normals_like", SigmaPoints())
    X, y = problem()
    mean, covariance, evidence = linear_regression(X, y, NOISE, PRIOR_STD**-2)
    variance = 1 / covariance.inverse().diagonal()
    bnn = regression(bl.Variational(samples=2 * D, antithetic=True), variance.sqrt())
    weight = bnn.model.weight
    weight.data.copy_(mean)
    (gradient,) = gradients(bnn, (X, y[:, None]), 1)
    assert gradient.abs().max() < 1e-6
    best = bnn.loss((X, y[:, None])).item()
    for factor, shift in ((1.1, 0), (0.9, 0), (1, 0.02), (1, -0.02)):
        set_std(bnn, factor * variance.sqrt())
        weight.data.copy_(mean + shift)
        assert bnn.loss((X, y[:, None])).item() > best + 1e-4
        assert gradients(bnn, (X, y[:, None]), 1).abs().max() > 1e-3
    assert -N * best == pytest.approx(exact_elbo(mean, variance).item(), rel=1e-6)
    gap = gaussian_kl(mean, torch.diag(variance), mean, covariance).item()
    assert gap > 0.1
    assert -N * best == pytest.approx(evidence.item() - gap, rel=1e-6)
    assert (variance < 0.95 * covariance.diagonal()).all()


METHODS = {
    "local": bl.Variational(estimator="local"),
    "flipout": bl.Variational(estimator="flipout"),
    "shared": bl.Variational(estimator="shared", samples=2),
    "antithetic": bl.Variational(samples=2, antithetic=True),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


@pytest.mark.parametrize(
    "method",  # the rate of 0.05 below is large enough for log σ
    [bl.Variational(std_rate=1.0), bl.Variational(samples=8, antithetic=True, std_rate=1.0)],
    ids=["local", "pairs"],
)
def test_training_reaches_the_optimum(method):
    X, y = problem()
    mean, covariance, evidence = linear_regression(X, y, NOISE, PRIOR_STD**-2)
    bnn = regression(method)
    nn.init.zeros_(bnn.model.weight)
    # many copies of the data in a batch are many draws of the noise for every example
    copies = 1 if method.noise_at == "shared" else 30
    batch = (X.repeat(copies, 1), y.repeat(copies)[:, None])
    optimizer, steps, path = bnn.optimizer(lr=0.05), 800, []
    for step in range(steps):
        optimizer.zero_grad()
        bnn.loss(batch).backward()
        optimizer.step()
        if step >= steps // 2:
            path.append([p.detach().clone().view(-1) for p in bnn.parameters()])
    # the average of the path is where it goes around
    weight, log_std = (torch.stack(values).mean(0) for values in zip(*path, strict=True))
    variance = 1 / covariance.inverse().diagonal()
    assert ((weight - mean).abs() < 0.1 * variance.sqrt()).all()
    assert torch.allclose((2 * log_std).exp(), variance, rtol=0.15)
    best = exact_elbo(mean, variance).item()
    reached = exact_elbo(weight, (2 * log_std).exp()).item()
    assert best - 0.02 < reached <= best < evidence.item()


@every_method
def test_gradients_are_those_of_the_exact_elbo(method):
    X, y = problem()
    std = torch.tensor([[0.1, 0.4, 0.05, 0.8]], dtype=torch.float64)
    bnn = regression(method, std)
    weight, log_std = (p.detach().view(-1).clone().requires_grad_() for p in bnn.parameters())
    loss = -exact_elbo(weight, (2 * log_std).exp()) / N
    exact = torch.cat(torch.autograd.grad(loss, [weight, log_std]))
    draws = gradients(bnn, (X, y[:, None]), 300)
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 4 * error + 1e-7 * exact.abs()).all()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()).double()


@pytest.mark.parametrize(
    ("build", "shape", "sites"),
    [(mlp, (3,), "all"), (convolution, (2, 3, 3), "weights")],
    ids=["linear", "convolution"],
)
def test_estimators_agree_in_expectation_and_differ_in_variance(build, shape, sites):
    """Layers applied once per example: per-example noise has the same expected gradient and less variance."""
    model, x, y = build(), torch.randn(32, *shape).double(), torch.randint(3, (32,))
    found, draws = {}, 300
    for estimator in ("local", "shared", "flipout"):
        method = bl.Variational(estimator=estimator)
        bnn = bl.bayesianize(model, method, likelihood=likelihoods.Categorical(), sites=sites, num_data=12)
        set_std(bnn, 0.3)
        found[estimator] = gradients(bnn, (x, y), draws, kl_weight=0.0)
    mean = {k: g.mean(0) for k, g in found.items()}
    variance = {k: g.var(0) for k, g in found.items()}
    for one, other in itertools.combinations(found, 2):
        error = ((variance[one] + variance[other]) / draws).sqrt()
        assert ((mean[one] - mean[other]).abs() < 4.5 * error + 1e-12).all(), (one, other)
    total = {k: v.sum().item() for k, v in variance.items()}
    assert total["local"] < 0.8 * total["shared"]
    assert total["flipout"] < 0.9 * total["shared"]


def test_with_one_example_flipout_has_the_variance_of_a_shared_draw():
    model, x, y = mlp(), torch.randn(1, 3).double(), torch.randint(3, (1,))
    total = {}
    for estimator in ("shared", "flipout"):
        method = bl.Variational(estimator=estimator)
        bnn = bl.bayesianize(model, method, likelihood=likelihoods.Categorical(), num_data=1)
        set_std(bnn, 0.3)
        total[estimator] = gradients(bnn, (x, y), 600, kl_weight=0.0).var(0).sum().item()
    assert total["flipout"] == pytest.approx(total["shared"], rel=0.25)


LAYERS = {
    "linear": (nn.Linear(5, 3), (5,)),
    "linear on a sequence": (nn.Linear(5, 3), (4, 5)),
    "conv1d, reflected": (nn.Conv1d(2, 3, 3, padding=2, padding_mode="reflect"), (2, 6)),
    "conv2d, grouped": (nn.Conv2d(4, 6, 3, groups=2, stride=2), (4, 5, 5)),
    "conv2d, depthwise, circular": (nn.Conv2d(3, 3, 3, groups=3, padding=1, padding_mode="circular"), (3, 4, 4)),
    "conv2d, dilated, same": (nn.Conv2d(2, 2, 3, dilation=2, padding="same"), (2, 5, 5)),
    "conv3d": (nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    "transposed 1d": (nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), (2, 4)),
    "transposed 2d, grouped": (nn.ConvTranspose2d(4, 2, 3, groups=2, dilation=2), (4, 3, 3)),
    "transposed 3d": (nn.ConvTranspose3d(1, 2, 2), (1, 2, 2, 2)),
}
every_layer = pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS.keys())


def noisy_layer(layer: nn.Module, estimator: str, sites: str) -> bl.Bayesian:
    method = bl.Variational(estimator=estimator)
    likelihood = likelihoods.Gaussian(1.0)
    bnn = bl.bayesianize(nn.Sequential(layer).double(), method, likelihood=likelihood, sites=sites, num_data=1)
    for name in bnn.sites.names:
        log_std = bnn.method.family.log_std(bnn.model, name)
        log_std.data.copy_(torch.rand_like(log_std) - 1)
    bnn.model[0].bias.data.fill_(100.0)
    return bnn


def outputs_jacobian(bnn: bl.Bayesian, x: torch.Tensor, name: str) -> torch.Tensor:
    """∂y/∂w of one parameter, (*y.shape, w), one entry at a time; the layer is linear, so this is all of it."""
    weight = bnn.model.get_parameter(name).detach()
    jacobian = torch.autograd.functional.jacobian(lambda w: call(bnn.mean_network(), x, {name: w}), weight)
    return jacobian.flatten(-weight.ndim)


@every_layer
@pytest.mark.parametrize("sites", ["weights", "all"])
def test_local_noise_has_the_exact_variance(layer, shape, sites, monkeypatch):
    """Var y = Σ (∂y/∂w)² σ²: the bias counts where it is random, and nowhere else."""
    bnn, x = noisy_layer(layer, "local", sites), torch.randn(3, *shape).double()
    q = bnn.posterior_
    expected = sum(outputs_jacobian(bnn, x, n).square() @ q.variance[n].flatten() for n in q.names)
    monkeypatch.setattr(stochastic, "standard_normal_like", lambda like, **_: torch.ones_like(like))
    mean = bnn.eval()(x)
    assert torch.allclose(mean, call(bnn.mean_network(), x))
    assert torch.allclose((bnn.train()(x) - mean).square(), expected)


@every_layer
@pytest.mark.parametrize("sites", ["weights", "all"])
def test_flipout_adds_the_perturbation_alone(layer, shape, sites, monkeypatch):
    """With ε = 1 and all signs +, the added noise is f(x; σ) without a bias, plus the bias's own σ."""
    bnn, x = noisy_layer(layer, "flipout", sites), torch.randn(3, *shape).double()
    q = bnn.posterior_
    expected = sum(outputs_jacobian(bnn, x, n) @ q.std[n].flatten() for n in q.names)
    monkeypatch.setattr(stochastic, "standard_normal_like", lambda like, **_: torch.ones_like(like))
    monkeypatch.setattr(stochastic, "_signs", lambda like, channel: torch.ones_like(like))
    assert torch.allclose(bnn.train()(x) - bnn.eval()(x), expected)


@pytest.mark.parametrize(
    ("layer", "estimator"), [("linear", "local"), ("conv2d, grouped", "flipout"), ("linear", "shared")]
)
def test_draws_have_the_exact_marginals(layer, estimator):
    layer, shape = LAYERS[layer]
    bnn, x = noisy_layer(layer, estimator, "all"), torch.randn(2, *shape).double()
    q = bnn.posterior_
    variance = sum(outputs_jacobian(bnn, x, n).square() @ q.variance[n].flatten() for n in q.names)
    draws = torch.stack([bnn(x).detach() for _ in range(1500)])
    assert ((draws.mean(0) - bnn.eval()(x)).abs() < 4.5 * (variance / 1500).sqrt()).all()
    assert torch.allclose(draws.var(0), variance, rtol=0.25)
    across_examples = torch.corrcoef(draws.flatten(1).T)[0, draws[0, 0].numel()]
    if estimator != "shared":
        assert across_examples.abs() < 4.5 / 1500**0.5


@pytest.mark.parametrize("estimator", ["local", "shared", "flipout"])
def test_several_samples_are_the_average_of_their_losses(estimator):
    X, y = problem()
    several = regression(bl.Variational(estimator=estimator, samples=3))
    one = regression(bl.Variational(estimator=estimator))
    one.load_state_dict(several.state_dict())
    for bnn in (several, one):
        bnn.loss((X, y[:, None]))  # settles which layers are noisy
    torch.manual_seed(3)
    together = several.loss((X, y[:, None])).item()
    torch.manual_seed(3)
    apart = [one.loss((X, y[:, None])).item() for _ in range(3)]
    assert together == pytest.approx(sum(apart) / 3, rel=1e-12)
    assert len(set(apart)) == 3


class Linear(likelihoods.Likelihood):
    """A likelihood whose logarithm is linear in the outputs."""

    name = "linear"

    def log_prob(self, outputs, targets):
        return outputs.sum(1)


def test_antithetic_pairs_cancel_linear_terms_exactly():
    method = bl.Variational(samples=4, antithetic=True)
    bnn = bl.bayesianize(nn.Linear(5, 3).double(), method, likelihood=Linear(), num_data=1)
    set_std(bnn, 2.0)
    x = torch.randn(7, 5).double()
    exact = -call(bnn.mean_network(), x).sum(1).mean().item()
    for _ in range(5):
        bnn.loss((x, x), kl_weight=0.0).backward()
        assert bnn.terms.nll.item() == pytest.approx(exact, rel=1e-12)
    assert bnn.model.get_parameter("weight" + method.family.suffix).grad.abs().max() < 1e-12
    plain = bl.bayesianize(nn.Linear(5, 3).double(), bl.Variational(samples=4), likelihood=Linear(), num_data=1)
    plain.loss((x, x), kl_weight=0.0).backward()
    assert plain.model.get_parameter("weight" + method.family.suffix).grad.abs().max() > 1e-6


def test_settings_are_checked():
    with pytest.raises(ValueError, match="estimator"):
        bl.Variational(estimator="exact")
    with pytest.raises(ValueError, match="samples"):
        bl.Variational(samples=0)
    for options in ({"samples": 3}, {"samples": 2, "estimator": "local"}, {"samples": 2, "estimator": "flipout"}):
        with pytest.raises(ValueError, match="antithetic"):
            bl.Variational(antithetic=True, **options)
    with pytest.raises(ValueError, match="initial_std"):
        bl.families.DiagonalGaussian(initial_std=0.0)


def test_starts_from_the_trained_network():
    model = mlp()
    method = bl.Variational(family=bl.families.DiagonalGaussian(initial_std=0.03))
    bnn = bl.bayesianize(model, method, likelihood=likelihoods.Categorical(), sites="all")
    for name, weight in model.named_parameters():
        assert torch.equal(bnn.posterior_.mean[name], weight)
        assert torch.allclose(bnn.posterior_.std[name], torch.full_like(weight, 0.03))
    x = torch.randn(4, 3).double()
    assert torch.equal(bnn.eval()(x), model(x))


def test_standard_deviations_have_a_larger_rate():
    bnn = bl.bayesianize(nn.Linear(3, 2), bl.Variational(std_rate=7.0), likelihood=Categorical(), num_data=10)
    groups = {group["lr"]: group["params"] for group in bnn.optimizer(lr=0.5).param_groups}
    assert groups.keys() == {0.5, 3.5}
    assert [p is bnn.model.weight_log_std for p in groups[3.5]] == [True]
    assert {id(p) for p in groups[0.5]} == {id(bnn.model.weight), id(bnn.model.bias)}
    with pytest.raises(ValueError, match="std_rate"):
        bl.Variational(std_rate=0.0)


def width_problem() -> tuple[bl.data.Loader, Tensor]:
    """A regression whose last two inputs are zero: the posterior of their weights is the prior."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(200, 2, generator=generator), torch.zeros(200, 2)], 1)
    y = x[:, :1] - x[:, 1:2] + 0.5 * torch.randn(200, 1, generator=generator)
    return bl.data.Loader(x, y, batch_size=20), torch.tensor([1 / (1 + 800)] * 2 + [1.0] * 2).sqrt()


def test_standard_deviations_arrive_within_short_training():
    """At the rate of the means they would have moved by a factor of 1.8 in as many steps."""
    data, exact = width_problem()
    method = bl.Variational(bl.families.DiagonalGaussian(initial_std=0.01), std_rate=10.0)
    bnn = bl.bayesianize(nn.Linear(4, 1, bias=False), method, likelihood=Gaussian(0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = bnn.fit(data, epochs=100, seed=0, progress=False)
    stds = bnn.posterior_.std["weight"][0]
    torch.testing.assert_close(stds, exact, rtol=0.45, atol=0)
    assert 1 / 1.1 < result.details["std_change"] < 1.1


def test_standard_deviations_start_by_fan_in_and_no_wider_than_the_prior():
    model = nn.Sequential(nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, 2), nn.Conv2d(4, 2, 10))
    wide = bl.bayesianize(model, bl.Variational(), likelihood=Categorical())
    narrow = bl.bayesianize(model, bl.Variational(), likelihood=Categorical(), prior=bl.priors.Normal(0.016))
    for name, start in (("0.weight", 0.03), ("2.weight", 0.3 / math.sqrt(400)), ("3.weight", 0.3 / math.sqrt(400))):
        assert float(wide.posterior_.std[name].max()) == pytest.approx(start)
        assert float(narrow.posterior_.std[name].max()) == pytest.approx(min(start, 0.016))


def test_a_short_fit_warns_that_standard_deviations_have_not_arrived():
    """Half of them move by a fifth in all, at a steady pace."""
    data, _ = width_problem()
    bnn = bl.bayesianize(nn.Linear(4, 1, bias=False), bl.Variational(), likelihood=Gaussian(0.5))
    with pytest.warns(BayeslimWarning, match=r"still moving"):
        result = bnn.fit(data, epochs=10, seed=0, progress=False)
    assert 1 / 1.1 < result.details["std_change"] < 1.1


def test_a_fit_whose_standard_deviations_still_move_warns():
    data, _ = width_problem()
    method = bl.Variational(bl.families.DiagonalGaussian(initial_std=0.01), std_rate=10.0)
    bnn = bl.bayesianize(nn.Linear(4, 1, bias=False), method, likelihood=Gaussian(0.5))
    with pytest.warns(BayeslimWarning, match=r"still moving .* by a factor of 1\..*understated.*more epochs"):
        bnn.fit(data, epochs=30, seed=0, progress=False)
