"""Predictions from Gaussian outputs against Monte Carlo and exact integrals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bayeslim.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from bayeslim.predict import links as outputs


def _outputs(examples: int = 4, size: int = 3, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    mean = torch.randn(examples, size).double()
    root = torch.randn(examples, size, size).double() * scale
    return mean, root @ root.mT


def test_draws_have_the_mean_and_covariance():
    mean, covariance = _outputs()
    draws = outputs.joint_draws(mean, covariance, 40_000)
    off = draws - mean
    found = torch.einsum("sbi,sbj->bij", off, off) / len(draws)
    scale = covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert ((found - covariance) / (scale[:, :, None] * scale[:, None, :])).abs().max() < 0.04
    assert (off.mean(0) / scale).abs().max() < 0.03


def test_draws_of_a_singular_covariance():
    mean = torch.zeros(2, 3).double()
    covariance = torch.ones(2, 3, 3).double()
    covariance[1] = 0
    draws = outputs.joint_draws(mean, covariance, 2000)
    torch.testing.assert_close(draws[:, 0, 0], draws[:, 0, 1], atol=1e-4, rtol=0)
    assert draws[:, 0].std() == pytest.approx(1, rel=0.1)
    assert (draws[:, 1] == 0).all()


def test_the_same_generator_gives_the_same_draws():
    mean, covariance = _outputs()
    first, second = (outputs.joint_draws(mean, covariance, 5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)


def test_regression_is_exact():
    mean, covariance = _outputs()
    found = outputs.summarise(Gaussian(0.5).double(), mean, covariance, 8)
    assert torch.equal(found.mean, mean)
    torch.testing.assert_close(found.epistemic, covariance.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(found.aleatoric, torch.full_like(mean, 0.25))
    torch.testing.assert_close(found.variance, found.aleatoric + found.epistemic)
    torch.testing.assert_close(found.entropy, torch.distributions.Normal(0, found.variance.sqrt()).entropy())
    assert found.samples.shape == (8, 4, 3)


@pytest.mark.parametrize("likelihood", [Gaussian("heteroscedastic"), Poisson()], ids=["heteroscedastic", "poisson"])
def test_moments_of_log_normal_quantities_are_exact(likelihood):
    mean, covariance = _outputs(3, 4, scale=0.3)
    closed = outputs.summarise(likelihood, mean, covariance, 2)
    sampled = likelihood.predict(outputs.joint_draws(mean, covariance, 200_000))
    for field in ("mean", "variance", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(closed, field), getattr(sampled, field), rtol=0.05, atol=1e-3)


@given(st.floats(-4, 4), st.floats(0, 9))
@settings(max_examples=30, deadline=None)
def test_probit_of_a_binary_output_is_near_the_integral(mean, variance):
    m, v = torch.tensor([[mean]]).double(), torch.tensor([[[variance]]]).double()
    found = outputs.summarise(Bernoulli(), m, v, 2, "probit").mean.item()
    default = outputs.summarise(Bernoulli(), m, v, 2)
    grid = torch.linspace(-8, 8, 4001).double()
    weights = torch.exp(-0.5 * grid**2)
    exact = (weights * torch.sigmoid(mean + math.sqrt(variance) * grid)).sum() / weights.sum()
    assert found == pytest.approx(float(exact), abs=0.02)
    assert default.mean.item() == pytest.approx(float(exact), abs=1e-3)
    probs = torch.sigmoid(mean + math.sqrt(variance) * grid)
    entropy = torch.special.entr(probs) + torch.special.entr(1 - probs)
    assert default.aleatoric.item() == pytest.approx(float((weights * entropy).sum() / weights.sum()), abs=2e-3)
    spread = (weights * (probs - exact).square()).sum() / weights.sum()
    assert default.variance.item() == pytest.approx(float(spread), abs=2e-3)


@pytest.mark.parametrize("how", ["probit", "extended-probit"])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_class_probabilities_are_near_those_of_many_draws(how, scale):
    mean, covariance = _outputs(50, 4, scale)
    exact = Categorical().predict(outputs.joint_draws(mean, covariance, 20_000)).probs
    found = outputs.summarise(Categorical(), mean, covariance, 2, how).probs
    torch.testing.assert_close(found.sum(-1), torch.ones(50).double())
    distance = (found - exact).abs().sum(-1).mean() / 2
    plain = (mean.softmax(-1) - exact).abs().sum(-1).mean() / 2
    assert distance < max(0.01, 0.75 * float(plain))


@pytest.mark.parametrize("how", ["auto", "glm", "joint", "probit", "extended-probit"])
def test_the_aleatoric_part_is_the_expected_entropy_of_one_network(how):
    mean, covariance = _outputs(50, 4, 2.0)
    draws = Categorical().predict(outputs.joint_draws(mean, covariance, 20_000)).aleatoric
    found = outputs.summarise(Categorical(), mean, covariance, 256, how)
    torch.testing.assert_close(found.aleatoric, draws.minimum(found.entropy), rtol=0, atol=0.03)
    assert (found.epistemic >= 0).all()


def test_the_default_of_classes_is_the_same_every_time_and_in_every_chunk(monkeypatch):
    mean, covariance = _outputs(7, 4)
    once = outputs.summarise(Categorical(), mean, covariance, 2)
    monkeypatch.setattr(outputs, "MAX_CLASS_NUMBERS", 1)
    again = outputs.summarise(Categorical(), mean, covariance, 3)
    for field in ("probs", "aleatoric", "epistemic", "variance"):
        torch.testing.assert_close(getattr(again, field), getattr(once, field))
    assert again.samples.shape == (3, 7, 4)


def test_the_default_of_classes_is_near_the_average_over_many_draws():
    torch.manual_seed(0)
    mean, covariance = _outputs(100, 10, 0.7)
    mean = 3 * mean
    exact = Categorical().predict(outputs.joint_draws(mean, covariance, 20_000)).probs

    def distance(samples: int, how: str = "auto") -> float:
        found = outputs.summarise(Categorical(), mean, covariance, samples, how).probs
        return float((found - exact).abs().sum(-1).mean()) / 2

    assert distance(32, "joint") < 0.05
    assert distance(256, "joint") < 0.015
    assert distance(2) < 0.02 < distance(2, "extended-probit") < distance(2, "probit")


def test_draws_do_not_depend_on_the_other_examples():
    mean, covariance = _outputs(5)
    whole, part = (outputs.joint_draws(mean[:n], covariance[:n], 8, torch.Generator().manual_seed(3)) for n in (5, 2))
    torch.testing.assert_close(whole[:, :2], part)


def test_extended_probit_ignores_what_all_logits_share():
    mean, covariance = _outputs()
    shared = covariance + 7.0
    torch.testing.assert_close(
        outputs.extended_probit(mean + 3.0, shared), outputs.extended_probit(mean, covariance), rtol=1e-9, atol=1e-12
    )
    assert (outputs.probit(mean + 3.0, shared) - outputs.probit(mean, covariance)).abs().max() > 1e-3


def test_extended_probit_of_two_classes_is_the_binary_probit():
    mean, covariance = _outputs(5, 2)
    between = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    binary = outputs.summarise(Bernoulli(), (mean[:, :1] - mean[:, 1:]), between[:, None, None], 2, "probit")
    torch.testing.assert_close(outputs.extended_probit(mean, covariance)[:, 0], binary.mean[:, 0])


def test_the_bridge_inverts_the_laplace_approximation_of_a_dirichlet():
    alpha = torch.tensor([[3.0, 7.0, 11.0, 2.0]]).double()
    k = alpha.shape[-1]
    mean = alpha.log() - alpha.log().mean(-1, keepdim=True)
    inverse = 1 / alpha
    covariance = torch.diag_embed(inverse) - (inverse[:, :, None] + inverse[:, None, :]) / k
    covariance = covariance + inverse.sum(-1)[:, None, None] / k**2
    torch.testing.assert_close(outputs.dirichlet(mean, covariance), alpha)


def test_without_uncertainty_every_link_is_the_softmax():
    mean = torch.randn(3, 4).double()
    nothing = torch.zeros(3, 4, 4).double()
    for how in ("probit", "extended-probit", "joint", "auto"):
        found = outputs.summarise(Categorical(), mean, nothing, 3, how)
        torch.testing.assert_close(found.probs, mean.softmax(-1))
        torch.testing.assert_close(found.epistemic, torch.zeros(3).double(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("how", ["probit", "extended-probit", "bridge", "joint"])
def test_uncertainties_of_classes_add_up(how):
    mean, covariance = _outputs(6, 4)
    found = outputs.summarise(Categorical(), mean, covariance, 64, how)
    torch.testing.assert_close(found.entropy, torch.special.entr(found.probs).sum(-1))
    torch.testing.assert_close(found.aleatoric + found.epistemic, found.entropy)
    assert (found.epistemic >= 0).all()
    assert (found.aleatoric >= 0).all()


def test_the_mutual_information_of_the_bridge_is_that_of_its_dirichlet():
    mean, covariance = _outputs(2, 3)
    alpha = outputs.dirichlet(mean, covariance)
    draws = torch.distributions.Dirichlet(alpha).sample((20_000,))
    expected = torch.special.entr(draws).sum(-1).mean(0)
    found = outputs.summarise(Categorical(), mean, covariance, 2, "bridge")
    torch.testing.assert_close(found.aleatoric, expected, rtol=0.03, atol=0.01)
    torch.testing.assert_close(found.variance, draws.var(0), rtol=0.1, atol=1e-3)


def test_classes_in_another_dimension_and_at_several_positions():
    mean = torch.randn(2, 3, 4).double()  # 3 classes at 4 positions
    root = torch.randn(2, 12, 12).double() / 3
    covariance = root @ root.mT
    found = outputs.summarise(Categorical(class_dim=1), mean, covariance, 16)
    assert found.probs.shape == (2, 4, 3)
    at = [c * 4 + 2 for c in range(3)]
    found = outputs.summarise(Categorical(class_dim=1), mean, covariance, 16, "extended-probit")
    alone = outputs.summarise(Categorical(), mean[:, :, 2], covariance[:, at][:, :, at], 2, "extended-probit")
    torch.testing.assert_close(found.probs[:, 2], alone.probs)
    assert found.samples.shape == (16, 2, 3, 4)


def test_batches_are_put_together_in_order():
    mean, covariance = _outputs(5, 3)
    seeded = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    whole = outputs.summarise(Categorical(), mean, covariance, 4, generator=seeded())
    parts = [
        outputs.summarise(Categorical(), mean[p], covariance[p], 4, generator=seeded())
        for p in (slice(0, 2), slice(2, 5))
    ]
    joined = outputs.concatenate(parts)
    torch.testing.assert_close(joined.probs, whole.probs)
    assert joined.samples.shape == whole.samples.shape
    assert len(joined) == 5
    regression = outputs.concatenate([outputs.summarise(Gaussian(1.0), mean[:1], covariance[:1], 4)] * 2)
    assert regression.probs is None


def test_an_unknown_likelihood_is_summarised_by_draws():
    class Other(Likelihood):
        name = "other"

        def predict(self, draws: Tensor):
            return Gaussian(1.0).predict(draws)

    mean, covariance = _outputs()
    found = outputs.summarise(Other(), mean, covariance, 8)
    torch.testing.assert_close(found.mean, found.samples.mean(0))


@pytest.mark.parametrize(
    ("likelihood", "how"), [(Gaussian(1.0), "probit"), (Poisson(), "bridge"), (Bernoulli(), "extended-probit")], ids=str
)
def test_a_link_of_another_likelihood_is_refused(likelihood, how):
    with pytest.raises(ValueError, match="is for categorical outputs"):
        outputs.summarise(likelihood, *_outputs(), 2, how)
    with pytest.raises(ValueError, match="how must be one of"):
        outputs.summarise(likelihood, *_outputs(), 2, "sigmoid")
