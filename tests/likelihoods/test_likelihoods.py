"""Likelihoods against torch.distributions, autograd Hessians and sample moments."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions, nn
from torch._subclasses import FakeTensorMode
from torch.distributions import Independent

import bayeslim as bl
from bayeslim.errors import BayeslimError, BayeslimWarning, NonFiniteLoss, ShapeMismatch
from bayeslim.io.registry import registered
from bayeslim.likelihoods import Bernoulli, Categorical, Gaussian, Poisson

NOISE = 0.7
SHAPES = [(5,), (5, 1), (5, 3), (5, 4, 3), (1, 1)]


def learned(noise: float = NOISE) -> Gaussian:
    return Gaussian("learned", initial_noise=noise)


def distribution(likelihood, f):
    """The same conditional distribution from torch.distributions, over every element."""
    match likelihood:
        case Bernoulli():
            return distributions.Bernoulli(logits=f)
        case Poisson():
            return distributions.Poisson(f.exp())
        case Gaussian(mode="heteroscedastic"):
            mean, log_variance = f.chunk(2, -1)
            return distributions.Normal(mean, log_variance.exp().sqrt())
        case Gaussian():
            return distributions.Normal(f, NOISE)
        case Categorical():
            return distributions.Categorical(logits=f.movedim(likelihood.class_dim, -1))
    raise AssertionError


ELEMENTWISE = [Bernoulli(), Poisson(), Gaussian(NOISE), learned()]


@pytest.mark.parametrize("likelihood", ELEMENTWISE, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_log_prob_of_elementwise_likelihoods(likelihood, shape):
    f = torch.randn(shape)
    p = distribution(likelihood, f)
    y = p.sample()
    expected = Independent(p, len(shape) - 1).log_prob(y)
    assert likelihood.log_prob(f, y).shape == shape[:1]
    assert torch.allclose(likelihood.log_prob(f, y), expected, atol=1e-5)


@pytest.mark.parametrize("likelihood", ELEMENTWISE, ids=repr)
def test_a_trailing_one_may_be_missing_on_either_side(likelihood):
    f = torch.randn(5, 1)
    y = distribution(likelihood, f).sample()
    whole = likelihood.log_prob(f, y)
    assert torch.equal(whole, likelihood.log_prob(f.squeeze(1), y))
    assert torch.equal(whole, likelihood.log_prob(f, y.squeeze(1)))
    assert torch.equal(whole, likelihood.log_prob(f.squeeze(1), y.squeeze(1)))


@pytest.mark.parametrize("likelihood", ELEMENTWISE, ids=repr)
@pytest.mark.parametrize(
    ("outputs", "targets"),
    [((5, 3), (5,)), ((5,), (5, 3)), ((5, 1), (1, 5)), ((5,), (1,)), ((5, 1), (5, 2)), ((5,), ())],
)
def test_shapes_never_broadcast(likelihood, outputs, targets):
    with pytest.raises(ShapeMismatch, match="needs targets of the outputs' shape"):
        likelihood.log_prob(torch.zeros(outputs), torch.zeros(targets))


@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4), (5, 2, 3, 4)], ids=str)
def test_heteroscedastic_log_prob(shape):
    likelihood, f = Gaussian("heteroscedastic"), torch.randn(shape)
    p = distribution(likelihood, f)
    y = p.sample()
    assert torch.allclose(likelihood.log_prob(f, y), Independent(p, len(shape) - 1).log_prob(y), atol=1e-5)


def test_heteroscedastic_shapes():
    likelihood, f, y = Gaussian("heteroscedastic"), torch.randn(5, 2), torch.randn(5)
    assert torch.equal(likelihood.log_prob(f, y), likelihood.log_prob(f, y[:, None]))
    with pytest.raises(ShapeMismatch, match="even"):
        likelihood.log_prob(torch.randn(5, 3), y)
    with pytest.raises(ShapeMismatch):
        likelihood.log_prob(torch.randn(5, 4), y)
    with pytest.raises(BayeslimError, match="each input"):
        _ = likelihood.noise


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((5, 3), -1), ((5, 3), 1), ((5, 4, 3), -1), ((5, 3, 4), 1), ((5, 3, 4, 2), 1), ((5, 3, 4, 2), -3)],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_categorical_log_prob(shape, dim, dtype):
    likelihood, f = Categorical(class_dim=dim), torch.randn(shape)
    p = distribution(likelihood, f)
    y = p.sample()
    expected = Independent(p, len(shape) - 2).log_prob(y)
    assert torch.allclose(likelihood.log_prob(f, y.to(dtype)), expected, atol=1e-5)


@pytest.mark.parametrize("dim", [-1, 1, -2])
def test_ignored_positions_contribute_nothing(dim):
    likelihood, f = Categorical(dim, ignore_index=9), torch.randn(5, 4, 4, requires_grad=True)
    y = torch.randint(4, (5, 4))
    y[:, 2:] = 9
    kept = f.movedim(dim, -1)[:, :2]
    expected = distributions.Categorical(logits=kept).log_prob(y[:, :2]).sum(1)
    assert torch.allclose(likelihood.log_prob(f, y), expected, atol=1e-5)
    (gradient,) = torch.autograd.grad(likelihood.log_prob(f, y).sum(), f)
    assert gradient.movedim(dim, -1)[:, 2:].abs().max() == 0
    assert torch.equal(likelihood.log_prob(f, torch.full_like(y, 9)), torch.zeros(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize(("shape", "dim"), [((6, 4), -1), ((6, 3, 4), -1), ((6, 4, 2, 2), 1)])
def test_mean_nll_is_the_mean_over_examples_those_that_are_ignored_too(shape, dim, dtype):
    outputs = torch.randn(shape).to(dtype).requires_grad_()
    targets = torch.randint(4, outputs.movedim(dim, -1).shape[:-1])
    targets[0] = -100
    one, other = Categorical(dim).mean_nll(outputs, targets), -Categorical(dim).log_prob(outputs, targets).mean()
    torch.testing.assert_close(one, other)
    gradients = [torch.autograd.grad(value, outputs)[0] for value in (one, other)]
    torch.testing.assert_close(*gradients)


def test_mean_nll_leaves_nothing_behind_in_tracers_and_transforms():
    x, y, likelihood = torch.randn(6, 3), torch.randint(4, (6,)), Categorical()

    def value(weight):
        return likelihood.mean_nll(x @ weight, y)

    weight = torch.randn(3, 4)
    with torch.inference_mode():
        value(weight)
    with FakeTensorMode(allow_non_fake_inputs=True):
        value(weight)
    assert type(value(weight)) is torch.Tensor
    for _ in range(2):
        slopes = [transform(value)(weight) for transform in (torch.func.grad, torch.func.jacrev)]
        torch.testing.assert_close(*slopes)
        assert torch.func.jacrev(torch.func.jacrev(value))(weight).isfinite().all()


def test_mean_nll_of_other_likelihoods():
    outputs, targets = torch.randn(5, 2), torch.rand(5, 2)
    likelihood = Gaussian(NOISE)
    torch.testing.assert_close(likelihood.mean_nll(outputs, targets), -likelihood.log_prob(outputs, targets).mean())


def test_categorical_refuses_other_targets():
    f = torch.randn(5, 3)
    for targets in (torch.zeros(5, 1).long(), torch.zeros(3).long(), torch.zeros(5, 3).long(), torch.tensor(0)):
        with pytest.raises(ShapeMismatch, match="targets of shape"):
            Categorical().log_prob(f, targets)
    with pytest.raises(ShapeMismatch, match="integer class indices"):
        Categorical().log_prob(f, torch.nn.functional.one_hot(torch.zeros(5).long(), 3).float())
    with pytest.raises(ShapeMismatch, match="class_dim"):
        Categorical().log_prob(torch.randn(5, 3, 8, 8), torch.zeros(5, 8, 8).long())


def block_hessian(likelihood, f, y):
    """−∇² log p(y|f) of every example in all its outputs, by autograd, (B, outputs, outputs)."""
    blocks = []
    for one, target in zip(f, y, strict=True):

        def energy(v, one=one, target=target):
            return -likelihood.log_prob(v.view(1, *one.shape), target[None]).sum()

        blocks.append(torch.autograd.functional.hessian(energy, one.reshape(-1)))
    return torch.stack(blocks)


def hessian_of_columns(columns):
    """Σ_k s_k s_kᵀ, block-diagonal over all but the last dimension of the outputs, (B, outputs, outputs)."""
    columns = columns.reshape(*columns.shape[:2], -1, columns.shape[-1])
    blocks = torch.einsum("kbmc,kbmd->bmcd", columns, columns)
    return torch.stack([torch.block_diag(*example) for example in blocks])


@pytest.mark.parametrize(
    ("likelihood", "shape"),
    [(like, shape) for like in ELEMENTWISE for shape in [(4,), (4, 1), (4, 3), (4, 2, 3)]]
    + [(Categorical(), (4, 3)), (Categorical(), (4, 2, 3))],
    ids=str,
)
def test_sqrt_hessian(likelihood, shape):
    f = torch.randn(shape, dtype=torch.float64)
    y = distribution(likelihood, f).sample()
    columns = likelihood.sqrt_hessian(f).detach()
    assert columns.shape[1:] == shape
    whole = hessian_of_columns(columns if len(shape) > 1 else columns.unsqueeze(-1))
    assert torch.allclose(whole, block_hessian(likelihood, f, y), atol=1e-6)


@pytest.mark.parametrize(("shape", "dim"), [((4, 3), 1), ((4, 3, 2), 1), ((4, 3, 2, 2), 1), ((4, 3, 2, 2), -3)])
def test_sqrt_hessian_with_classes_elsewhere(shape, dim):
    likelihood, f = Categorical(class_dim=dim), torch.randn(shape, dtype=torch.float64)
    y = distribution(likelihood, f).sample()
    columns = likelihood.sqrt_hessian(f)
    assert columns.shape == (2, *shape)
    last_f = f.movedim(dim, -1)
    last_columns = columns.movedim(2, -1)
    assert torch.allclose(hessian_of_columns(last_columns), block_hessian(Categorical(), last_f, y), atol=1e-8)


@pytest.mark.parametrize("certain", [0, 1, 3])
def test_sqrt_hessian_of_certain_classes(certain):
    """Probabilities that underflow leave nothing behind, and small ones keep their precision."""
    f = torch.full((1, 4), -20.0)
    f[0, certain] = 0.0
    exact = f.double().softmax(-1)[0]
    truth = torch.diag(exact) - torch.outer(exact, exact)
    torch.testing.assert_close(
        hessian_of_columns(Categorical().sqrt_hessian(f))[0].double(), truth, rtol=1e-4, atol=1e-15
    )
    gone = Categorical().sqrt_hessian(50 * f)
    assert torch.equal(gone, torch.zeros_like(gone))


def test_one_class_has_no_curvature():
    assert Categorical().sqrt_hessian(torch.randn(5, 1)).shape == (0, 5, 1)


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 2)])
def test_sqrt_fisher_of_input_dependent_noise(shape):
    """The Fisher information is the autograd Hessian, averaged over targets."""
    likelihood, f = Gaussian("heteroscedastic"), torch.randn(shape, dtype=torch.float64) * 0.5
    fisher = hessian_of_columns(likelihood.sqrt_hessian(f))
    # That Hessian is quadratic in y, so its values at mean ± std average to its expectation.
    mean, log_variance = f.chunk(2, -1)
    std = log_variance.exp().sqrt()
    expected = sum(block_hessian(likelihood, f, mean + sign * std) for sign in (-1, 1)) / 2
    assert torch.allclose(fisher, expected, atol=1e-8)


@pytest.mark.parametrize("likelihood", [*ELEMENTWISE, Gaussian("heteroscedastic"), Categorical()], ids=repr)
def test_samples_have_the_right_moments(likelihood):
    f = torch.tensor([[0.3, -1.0], [1.2, 0.4]])
    n, generator = 40_000, torch.Generator().manual_seed(0)
    many = f.expand(n, *f.shape)
    draws = likelihood.sample(many, generator=generator).detach()
    p = distribution(likelihood, f)
    mean, variance = p.mean, p.variance
    if isinstance(likelihood, Categorical):
        mean, variance = p.probs[..., 1], p.probs[..., 1] * p.probs[..., 0]
    assert draws.shape == (n, *mean.shape)
    assert torch.allclose(draws.float().mean(0), mean, atol=5 * float((variance / n).sqrt().max()))
    assert torch.allclose(draws.float().var(0), variance, rtol=0.08)
    again = likelihood.sample(many, generator=torch.Generator().manual_seed(0)).detach()
    assert torch.equal(draws, again)


def test_samples_of_classes_elsewhere_are_targets():
    f = torch.randn(5, 3, 4, 2)
    y = Categorical(class_dim=1).sample(f)
    assert y.shape == (5, 4, 2)
    assert Categorical(class_dim=1).log_prob(f, y).shape == (5,)


logits = st.integers(0, 2**32 - 1).flatmap(
    lambda seed: st.tuples(st.just(seed), st.integers(1, 8), st.integers(2, 6), st.floats(0.01, 30))
)


@settings(deadline=None, max_examples=20)
@given(logits)
def test_entropies_of_classes(drawn):
    seed, samples, classes, scale = drawn
    f = scale * torch.randn(samples, 7, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    prediction = Categorical().predict(f)
    check_entropies(prediction, distributions.Categorical(logits=f).entropy().mean(0), math.log(classes))
    assert torch.allclose(prediction.probs.sum(-1).double(), torch.ones(7, dtype=torch.float64))
    assert torch.allclose(prediction.mean.double(), f.softmax(-1).mean(0), atol=1e-6)
    if samples == 1:
        assert prediction.epistemic.max() < 1e-6


@settings(deadline=None, max_examples=20)
@given(logits)
def test_entropies_of_binary_targets(drawn):
    seed, samples, targets, scale = drawn
    f = scale * torch.randn(samples, 7, targets, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    prediction = Bernoulli().predict(f)
    check_entropies(prediction, distributions.Bernoulli(logits=f).entropy().mean(0), math.log(2))
    expected = distributions.Bernoulli(f.sigmoid().mean(0)).entropy()
    assert torch.allclose(prediction.entropy.double(), expected, atol=1e-5)


def check_entropies(prediction, aleatoric, largest):
    assert torch.allclose(prediction.aleatoric, aleatoric, atol=1e-6)
    assert torch.allclose(prediction.entropy, prediction.aleatoric + prediction.epistemic, atol=1e-5)
    assert prediction.aleatoric.min() >= 0
    assert prediction.epistemic.min() >= 0
    assert prediction.entropy.max() <= largest + 1e-5
    assert prediction.variance.min() >= 0


@settings(deadline=None, max_examples=20)
@given(logits)
def test_variances_of_values_and_counts(drawn):
    """The law of total variance, against the moments of the mixture."""
    seed, samples, targets, scale = drawn
    f = min(scale, 3) * torch.randn(
        samples, 7, 2 * targets, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    for likelihood in (Gaussian(NOISE), learned(), Gaussian("heteroscedastic"), Poisson()):
        prediction = likelihood.predict(f)
        p = distribution(likelihood, f)
        second = (p.variance + p.mean.square()).mean(0)
        assert torch.allclose(prediction.mean.double(), p.mean.mean(0), rtol=1e-5)
        assert torch.allclose(prediction.variance.double(), second - p.mean.mean(0).square(), rtol=1e-4, atol=1e-5)
        assert torch.allclose(prediction.variance, prediction.aleatoric + prediction.epistemic)
        assert prediction.probs is None


def test_prediction_with_classes_elsewhere():
    f = torch.randn(6, 5, 3, 4, 2)
    expected = Categorical().predict(f.movedim(2, -1))
    for dim in (1, -3):
        prediction = Categorical(class_dim=dim).predict(f)
        assert torch.allclose(prediction.probs, expected.probs)
        assert torch.allclose(prediction.epistemic, expected.epistemic)
        assert prediction.classes.shape == (5, 4, 2)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Poisson(), Gaussian(NOISE), learned()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_is_kept(likelihood, dtype):
    f = torch.randn(6, 5, 3, dtype=dtype)
    prediction = likelihood.predict(f)
    assert prediction.mean.dtype == dtype
    assert prediction.entropy.dtype == dtype
    y = torch.zeros(5, dtype=torch.long) if isinstance(likelihood, Categorical) else torch.zeros(5, 3)
    assert likelihood.log_prob(f[0], y).dtype == dtype


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Poisson(), Gaussian(NOISE)], ids=repr)
def test_half_precision_outputs_are_summarised_in_single(likelihood):
    f = torch.randn(64, 5, 3)
    prediction, exact = likelihood.predict(f.bfloat16()), likelihood.predict(f.bfloat16().float())
    for got, expected in ((prediction.mean, exact.mean), (prediction.epistemic, exact.epistemic)):
        assert got.dtype == torch.float32
        assert torch.allclose(got, expected)
    y = torch.zeros(5, dtype=torch.long) if isinstance(likelihood, Categorical) else torch.ones(5, 3)
    assert torch.equal(likelihood.log_prob(f[0].bfloat16(), y), likelihood.log_prob(f[0].bfloat16().float(), y))
    assert likelihood.sqrt_hessian(f[0].bfloat16()).dtype == torch.bfloat16


def test_the_noise_is_a_standard_deviation():
    assert Gaussian(0.3).noise.item() == pytest.approx(0.3)
    assert learned(0.3).noise.item() == pytest.approx(0.3)
    assert Gaussian(0.3).predict(torch.zeros(4, 5, 1)).variance.mean().item() == pytest.approx(0.09)
    for bad in (0, -1.0, math.nan, "loud"):
        with pytest.raises(ValueError, match="noise"):
            Gaussian(bad)
    with pytest.raises(ValueError, match="initial_noise"):
        Gaussian("learned", initial_noise=-1.0)


def test_a_learned_noise_is_stationary_at_the_maximum_likelihood():
    y = torch.randn(400, 1, dtype=torch.float64)
    root_mean_square = y.square().mean().sqrt().item()

    def slope(noise):
        likelihood = learned(noise).double()
        (gradient,) = torch.autograd.grad(-likelihood.log_prob(torch.zeros_like(y), y).mean(), [likelihood.log_noise])
        return gradient.item()

    assert slope(root_mean_square) == pytest.approx(0, abs=1e-6)
    assert slope(0.9 * root_mean_square) < 0 < slope(1.1 * root_mean_square)


def test_only_a_learned_noise_is_trained():
    assert list(Gaussian(NOISE).parameters()) == []
    assert Gaussian(NOISE).state_dict() == {}
    assert list(learned().state_dict()) == ["log_noise"]


@pytest.mark.parametrize("likelihood", [*ELEMENTWISE, Gaussian("heteroscedastic"), Categorical(1, 7)], ids=repr)
def test_config_builds_it_again(likelihood):
    again = registered("likelihood", likelihood.name)(**likelihood.config())
    assert repr(again) == repr(likelihood)
    assert isinstance(again, nn.Module)


def test_categorical_prediction_is_that_of_its_definition() -> None:
    logits = 5 * torch.randn(6, 7, 4, dtype=torch.float64)
    logits[:, 2, 1] = -torch.inf  # a class that is ruled out
    prediction = Categorical().predict(logits)
    probs = logits.softmax(-1)
    entropies = torch.distributions.Categorical(probs).entropy()
    torch.testing.assert_close(prediction.probs, probs.mean(0))
    torch.testing.assert_close(prediction.variance, probs.var(0, correction=0))
    torch.testing.assert_close(prediction.aleatoric, entropies.mean(0))
    torch.testing.assert_close(prediction.entropy, torch.distributions.Categorical(probs.mean(0)).entropy())
    assert prediction.probs[2, 1] == 0


def test_categorical_prediction_has_gradients() -> None:
    logits = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f: (p := Categorical().predict(f)).aleatoric + p.variance.sum(-1), logits)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "words"),
    [
        (Categorical(), 3, torch.tensor([0, 1, 2, 3]), "targets from 0 to 2, .* Got 0 to 3"),
        (Bernoulli(), 1, torch.tensor([[0.0], [1.0], [2.0], [0.0]]), "Bernoulli needs targets from 0 to 1. Got 0 to 2"),
        (Poisson(), 1, torch.tensor([[0.0], [1.0], [-2.0], [0.0]]), "Poisson needs targets of at least 0. Got -2 to 1"),
    ],
)
@pytest.mark.parametrize("method", [bl.Variational(), bl.Laplace(), bl.SGLD(samples=1)])
def test_targets_that_cannot_be_are_refused(likelihood, outputs, targets, words, method):
    bnn = bl.bayesianize(nn.Linear(2, outputs), method, likelihood=likelihood)
    with pytest.raises(ShapeMismatch, match=words):
        bnn.fit([(torch.randn(4, 2), targets)], progress=False, **({} if method.name == "laplace" else {"epochs": 1}))


def test_laplace_looks_at_the_targets():
    x = torch.randn(4, 2)
    for y, error, words in (
        (torch.rand(4), ShapeMismatch, "integer class indices"),
        (torch.zeros(3).long(), ShapeMismatch, "needs targets of shape"),
    ):
        bnn = bl.bayesianize(nn.Linear(2, 3), bl.Laplace(), likelihood=Categorical())
        with pytest.raises(error, match=words):
            bnn.fit([(x, y)], progress=False)
    bnn = bl.bayesianize(nn.Linear(2, 1), bl.Laplace(), likelihood=Gaussian(0.1))
    with pytest.raises(NonFiniteLoss, match="first batch is nan"):
        bnn.fit([(x, torch.full((4, 1), torch.nan))], progress=False)


def test_probabilities_in_the_place_of_logits_are_told():
    network = nn.Sequential(nn.Linear(2, 3), nn.Softmax(-1))
    bnn = bl.bayesianize(network, bl.Laplace(), likelihood=Categorical())
    with pytest.warns(BayeslimWarning, match="leave out the softmax"):
        bnn.fit([(torch.randn(8, 2), torch.zeros(8).long())], progress=False)


@pytest.mark.parametrize("targets", [torch.eye(3).long(), torch.zeros(3, 1).long()])
def test_one_hot_rows_and_columns_are_named(targets):
    with pytest.raises(ShapeMismatch, match=r"targets.argmax\(-1\) for one-hot rows, targets.squeeze\(-1\) for a col"):
        Categorical().log_prob(torch.zeros(3, 3), targets)
