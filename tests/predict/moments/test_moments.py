"""`predict(how="moments")`: shared noise, draws of the outputs, other likelihoods, and what it cannot do."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from random_networks import bayesian, carried, drawn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim import likelihoods
from bayeslim.errors import UnsupportedModel
from bayeslim.predict.moments import RULES, Moments, rule
from bayeslim.predict.moments.draws import Outputs, normal_points
from oracles import linear_regression


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def perceptron(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(3)
    parts: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        parts += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*parts[:-1])


def covariance_of(moments: Moments) -> torch.Tensor:
    """The whole covariance of the outputs, (N, O, O)."""
    own = moments.sigma2 - moments.common.variance()
    return moments.common.covariance() + torch.diag_embed(own)


def test_a_linear_network_has_its_exact_covariance():
    """Cov[Wz] = μ Cov[z] μᵀ + diag(Σ σ² E[z²]), layer after layer."""
    bnn, x = bayesian(perceptron(4, 7, 9, 5, activation=nn.Identity)), torch.randn(6, 4).double()
    mean, covariance = x, torch.zeros(6, 4, 4).double()
    posterior = bnn.posterior_
    for index in (0, 2, 4):
        weight, variance = posterior.mean[f"{index}.weight"], posterior.variance[f"{index}.weight"]
        second = mean.square() + covariance.diagonal(dim1=1, dim2=2)
        covariance = weight @ covariance @ weight.T + torch.diag_embed(second @ variance.T)
        mean = mean @ weight.T + bnn.model[index].bias
    ours = carried(bnn, x)
    assert torch.allclose(ours.mu, mean)
    assert torch.allclose(ours.sigma2, covariance.diagonal(dim1=1, dim2=2))
    assert torch.allclose(covariance_of(ours), covariance)


def test_wide_layers_keep_the_directions_that_count():
    """Weights of rank 5 in a layer of 40 units: the eight directions that are kept hold all of what is shared."""
    bnn = bayesian(perceptron(6, 20, 40, 3, activation=nn.Identity), std=0.1)
    middle = bnn.model[2].weight
    middle.data.copy_(torch.randn(40, 5).double() @ torch.randn(5, 20).double() / 5)
    x = torch.randn(4, 6).double()
    ours, draws = carried(bnn, x), drawn(bnn, x, 40_000)
    centred = (draws - draws.mean(0)).movedim(0, -1)
    exact = torch.einsum("bis,bjs->bij", centred, centred) / len(draws)
    scale = exact.diagonal(dim1=1, dim2=2).max()
    assert torch.allclose(covariance_of(ours), exact, atol=0.03 * scale)
    assert (exact - torch.diag_embed(exact.diagonal(dim1=1, dim2=2))).abs().max() > 0.1 * scale  # there is some


@pytest.mark.parametrize(
    "network",
    [
        perceptron(10, 40, 40, 5),
        nn.Sequential(
            nn.Unflatten(1, (1, 10)),
            nn.Conv1d(1, 6, 3),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Flatten(),
            *perceptron(24, 20, 5),
        ),
    ],
    ids=["perceptron", "convolutions"],
)
def test_closer_to_many_samples_than_32_samples_are(network):
    bnn = bayesian(network, std=0.15, likelihood=likelihoods.Categorical())
    x = 2 * torch.randn(40, 10).double()
    exact = drawn(bnn, x, 8_000).softmax(-1).mean(0)

    def off(**how) -> float:
        return (bl.predict(bnn, x, generator=seeded(), **how).probs - exact).abs().sum(-1).mean().item() / 2

    assert off(how="moments") < 0.6 * off(how="sample", samples=32)


def test_the_summary_is_that_of_the_draws():
    bnn = bayesian(perceptron(10, 20, 5), likelihood=likelihoods.Categorical())
    prediction = bl.predict(bnn, torch.randn(300, 10).double(), how="moments")
    assert prediction.samples.shape == (256, 300, 5)
    again = bnn.likelihood.predict(prediction.samples)
    for field in ("mean", "probs", "variance", "entropy", "aleatoric", "epistemic"):
        assert torch.allclose(getattr(prediction, field), getattr(again, field), atol=1e-12)


@pytest.mark.parametrize("outputs", [5, 30])
def test_draws_have_the_moments(outputs):
    """A few outputs by their whole covariance, many by shared and own noise."""
    bnn, x = bayesian(perceptron(6, 20, outputs)), torch.randn(8, 6).double()
    ours = carried(bnn, x)
    samples = bl.predict(bnn, x, samples=4096, how="moments", generator=seeded()).samples
    assert torch.allclose(samples.mean(0), ours.mu, atol=0.01 * ours.sigma2.max().sqrt().item())
    assert torch.allclose(samples.var(0), ours.sigma2, rtol=0.05)
    centred = (samples - samples.mean(0)).movedim(0, -1)
    assert torch.allclose(centred @ centred.mT / 4096, covariance_of(ours), atol=0.05 * ours.sigma2.max().item())


def test_points_are_normal_and_follow_the_seed():
    torch.manual_seed(5)
    points = normal_points(3, 1024)
    torch.manual_seed(5)
    assert torch.equal(points, normal_points(3, 1024))
    assert not torch.equal(points, normal_points(3, 1024))
    assert points.isfinite().all()
    assert torch.allclose(torch.cov(points), torch.eye(3).double(), atol=0.03)  # ordinary draws: about 0.03 each
    assert normal_points(30_000, 8).shape == (30_000, 8)


@pytest.mark.parametrize("batch_size", [3, None])
def test_batches_do_not_change_the_result(batch_size):
    bnn, x = bayesian(perceptron(6, 20, 4), likelihood=likelihoods.Categorical()), torch.randn(10, 6).double()
    whole = bl.predict(bnn, x, how="moments", generator=seeded())
    parts = bl.predict(bnn, x, how="moments", generator=seeded(), batch_size=batch_size)
    loader = DataLoader(TensorDataset(x, torch.zeros(10)), batch_size=4)
    loaded = bl.predict(bnn, loader, how="moments", generator=seeded())
    for other in (parts, loaded):
        assert torch.allclose(whole.samples, other.samples)
        assert torch.allclose(whole.epistemic, other.epistemic)


def test_repeats_by_generator_and_leaves_no_trace():
    bnn, x = bayesian(perceptron(6, 20, 4), likelihood=likelihoods.Categorical()), torch.randn(10, 6).double()
    bnn.train()
    state, random = {k: v.clone() for k, v in bnn.state_dict().items()}, torch.get_rng_state()
    first, second = (bl.predict(bnn, x, how="moments", generator=seeded(4)) for _ in range(2))
    assert torch.equal(first.samples, second.samples)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(v, state[k]) for k, v in bnn.state_dict().items())
    assert bnn.training
    assert not first.samples.requires_grad
    assert not torch.equal(first.samples, bl.predict(bnn, x, how="moments").samples)


def test_linear_regression_has_its_exact_predictive():
    noise = 0.6
    X = torch.linalg.qr(torch.randn(12, 3).double())[0] * torch.tensor([3.0, 2.0, 1.0])
    y = X @ torch.randn(3).double() + noise * torch.randn(12)
    mean, covariance, _ = linear_regression(X, y, noise, 1.0)
    bnn = bl.bayesianize(
        nn.Linear(3, 1, bias=False).double(), bl.Variational(), likelihood=likelihoods.Gaussian(noise), num_data=12
    )
    bnn.model.weight.data.copy_(mean)
    bnn.model.weight_log_std.data.copy_(covariance.diagonal().log() / 2)
    x = torch.randn(5, 3).double()
    prediction = bl.predict(bnn, x, how="moments")
    spread = (x @ covariance * x).sum(1, keepdim=True)
    assert torch.allclose(prediction.mean, (x @ mean)[:, None], atol=1e-2 * spread.max().sqrt().item())
    assert torch.allclose(prediction.epistemic, spread, rtol=0.03)


LIKELIHOODS = {
    "bernoulli": (likelihoods.Bernoulli(), nn.Linear(6, 3)),
    "poisson": (likelihoods.Poisson(), nn.Linear(6, 3)),
    "heteroscedastic": (likelihoods.Gaussian("heteroscedastic"), nn.Linear(6, 4)),
    "images": (likelihoods.Categorical(class_dim=1), nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3))),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_likelihood_agrees_with_sampling(name):
    likelihood, model = LIKELIHOODS[name]
    bnn, x = bayesian(model, std=0.1, likelihood=likelihood), torch.randn(7, 6).double()
    moments = bl.predict(bnn, x, how="moments", generator=seeded())
    sampled = bl.predict(bnn, x, samples=2000, how="sample", generator=seeded())
    assert moments.samples.shape == (256, *sampled.samples.shape[1:])
    assert torch.allclose(moments.mean, sampled.mean, rtol=0.1, atol=0.02)
    assert torch.allclose(moments.entropy, sampled.entropy, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("end", [nn.LogSoftmax(1), nn.LogSoftmax(-1)])
def test_a_softmax_at_the_end_is_left_to_the_likelihood(end):
    plain = bayesian(perceptron(6, 10, 4), likelihood=likelihoods.Categorical())
    ended = bayesian(nn.Sequential(*perceptron(6, 10, 4), end), likelihood=likelihoods.Categorical())
    x = torch.randn(9, 6).double()
    one, other = (bl.predict(bnn, x, how="moments", generator=seeded()) for bnn in (plain, ended))
    assert torch.allclose(one.probs, other.probs)
    assert torch.allclose(other.samples.logsumexp(-1), torch.zeros(()).double(), atol=1e-12)


def test_an_activation_at_the_end_is_applied_to_the_draws():
    bnn, x = bayesian(nn.Sequential(nn.Linear(6, 2), nn.Softplus())), torch.randn(9, 6).double()
    prediction = bl.predict(bnn, x, samples=2048, how="moments")
    assert prediction.samples.min() > 0
    assert torch.allclose(prediction.mean, drawn(bnn, x, 40_000).mean(0), rtol=0.02)


def test_nothing_random_is_one_network():
    bnn = bayesian(nn.Linear(6, 2))
    bnn.model.weight_log_std.data.fill_(-torch.inf)
    x = torch.randn(9, 6).double()
    prediction = bl.predict(bnn, x, how="moments")
    assert torch.allclose(prediction.samples, bnn.model(x).expand(256, 9, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    """A spread of 1e-4 has a variance that half precision cannot add to anything."""
    network = perceptron(6, 20, 4).to(dtype)
    bnn = bl.bayesianize(
        network,
        bl.Variational(family=bl.families.DiagonalGaussian(initial_std=1e-4)),
        likelihood=likelihoods.Categorical(),
        num_data=1,
    )
    prediction = bl.predict(bnn, torch.randn(9, 6, dtype=dtype), how="moments")
    assert prediction.samples.dtype == torch.float32
    assert 1e-5 < prediction.samples.std(0).mean() < 1e-2
    assert prediction.probs.isfinite().all()


@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet18"])
def test_networks_of_the_zoo(name):
    small = name == "resnet18"
    network = bl.zoo.create(name, **({"width": 4} if small else {}))
    x = torch.rand(2, 3, 8, 8) if small else torch.rand(2, 1, 28, 28)
    bnn = bl.bayesianize(network, bl.Variational(), likelihood=likelihoods.Categorical(), num_data=1)
    prediction = bl.predict(bnn, x, how="moments")
    assert prediction.probs.isfinite().all()
    sampled = bl.predict(bnn, x, samples=20, how="sample")
    assert (prediction.probs - sampled.probs).abs().max() < 0.05


class Middle(nn.Module):
    """A function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, 6), nn.Linear(6, 4), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


REFUSED = {
    "layer_norm": (nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), 'layer_norm.*"sample"'),
    "the module is named": (nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.LayerNorm(6))), r'"1\.0" \(LayerNorm\)'),
    "lstm": (bl.zoo.create("lstm", features=6, hidden=4), "lstm"),
    "attention": (Middle(lambda z: F.scaled_dot_product_attention(z, z, z)), "scaled_dot_product_attention"),
    "reading a value": (Middle(lambda z: z if z.sum() > 0 else -z), "no rule"),
    "softmax inside": (Middle(lambda z: z.softmax(-1)), "softmax can only be the last"),
    "dependent factors": (Middle(lambda z: z * z.sigmoid()), 'depend on the random "first.weight"'),
    "a layer used twice": (nn.Sequential(*[nn.Linear(6, 6)] * 2), 'depend on the random "0.weight"'),
    "dropout that stays on": (Middle(lambda z: F.dropout(z, 0.5, training=True)), "drops units"),
    "division": (Middle(lambda z: z / z), "divided"),
    "indices": (Middle(lambda z: F.max_pool1d(z, 2, return_indices=True)[0].repeat(1, 2)), "max_pool1d"),
    "batch statistics": (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)), "batch_norm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused_by_name(name):
    network, words = REFUSED[name]
    bnn, x = bayesian(network), torch.randn(5, 6).double()
    with pytest.raises(UnsupportedModel, match=words) as caught:
        bl.predict(bnn, x, how="moments")
    assert 'how="sample" works' in str(caught.value)


def test_a_posterior_that_is_not_diagonal_is_refused():
    bnn = bl.bayesianize(nn.Linear(6, 4), bl.Laplace(), likelihood=likelihoods.Categorical(), num_data=8)
    bnn.fit([(torch.randn(8, 6), torch.randint(4, (8,)))])
    with pytest.raises(ValueError, match="moments"):
        bl.predict(bnn, torch.randn(5, 6), how="moments")


def test_a_new_operation_is_one_entry():
    bnn, x = bayesian(Middle(lambda z: torch.special.zeta(z, z))), torch.randn(5, 6).double()
    with pytest.raises(UnsupportedModel, match="zeta"):
        bl.predict(bnn, x, how="moments")
    try:

        @rule("special_zeta")
        def _(func, a, b):
            a = a.settled()
            return Moments.of(2 * a.mu, 4 * a.sigma2, a.sources)

        assert bl.predict(bnn, x, how="moments").mean.isfinite().all()
    finally:
        del RULES["special_zeta"]


def test_outputs_of_several_dimensions():
    bnn, x = bayesian(nn.Conv2d(1, 2, 3)), torch.randn(3, 1, 5, 5).double()
    outputs = Outputs.of(carried(bnn, x))
    assert outputs.std.shape == (3, 18)
    prediction = bl.predict(bnn, x, how="moments")
    assert prediction.samples.shape == (256, 3, 2, 3, 3)
    assert torch.allclose(prediction.epistemic, carried(bnn, x).sigma2, rtol=0.1)
