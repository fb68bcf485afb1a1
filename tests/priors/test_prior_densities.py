"""Every prior against other people's densities, numerical integrals and counting."""

from __future__ import annotations

import math

import integrals
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import distributions as D

from bayeslim import priors
from bayeslim.errors import ImproperPrior
from bayeslim.io.registry import registered
from bayeslim.priors.laplace import expected_absolute

SIGMA2 = math.exp(-2)


class Mixed:
    """The scale mixture, from its definition."""

    def _sum(self, what: str, w) -> np.ndarray:
        return 0.25 * getattr(stats.norm(0, 1), what)(w) + 0.75 * getattr(stats.norm(0, SIGMA2), what)(w)

    def logpdf(self, w) -> np.ndarray:
        return np.log(self._sum("pdf", w))

    def cdf(self, w) -> np.ndarray:
        return self._sum("cdf", w)


OTHERS = {  # ours, and what is not ours
    "normal": (priors.Normal(0.4, 0.2), stats.norm(0.2, 0.4)),
    "laplace": (priors.Laplace(0.3), stats.laplace(0, 0.3)),
    "student": (priors.StudentT(2.5, 0.4), stats.t(2.5, 0, 0.4)),
    "mixture": (priors.ScaleMixture(0.25, 1.0, SIGMA2), Mixed()),
    "cauchy": (priors.Distribution(D.Cauchy(0.1, 0.5)), stats.cauchy(0.1, 0.5)),
    "gumbel": (priors.Distribution(D.Gumbel(0.0, 0.7)), stats.gumbel_r(0, 0.7)),
}
every = pytest.mark.parametrize(("prior", "other"), OTHERS.values(), ids=OTHERS.keys())
ESTIMATED = {name: OTHERS[name][0] for name in ("student", "mixture", "cauchy")}
POSTERIORS = [(0.0, 0.3), (0.8, 0.5), (-2.0, 0.05), (0.01, 2.0)]


def double(*values: float) -> list[torch.Tensor]:
    return [torch.tensor([v], dtype=torch.float64) for v in values]


@every
def test_density_is_right_and_integrates_to_one(prior, other):
    w = torch.linspace(-4, 4, 81, dtype=torch.float64)
    torch.testing.assert_close(prior.log_prob(w), torch.as_tensor(other.logpdf(w.numpy())))
    # in t = asinh w, where even a Cauchy's tails fall off quickly
    t = torch.linspace(-90, 90, 200_001, dtype=torch.float64)
    total = torch.trapezoid(prior.log_prob(t.sinh()).exp() * t.cosh(), t)
    assert total.item() == pytest.approx(1, abs=1e-6)


@every
def test_samples_follow_the_density(prior, other):
    draws = prior.sample((20_000,), generator=torch.Generator().manual_seed(0))
    distance = stats.kstest(draws.double().numpy(), other.cdf).statistic
    assert distance < 1.63 / 20_000**0.5  # one in a hundred is larger
    assert torch.equal(draws, prior.sample((20_000,), generator=torch.Generator().manual_seed(0)))
    assert prior.sample((2, 3)).shape == (2, 3)


@pytest.mark.parametrize(("mean", "std"), POSTERIORS)
@pytest.mark.parametrize("name", ["normal", "laplace", "gumbel"])
def test_closed_forms_against_integrals(name, mean, std):
    prior = OTHERS[name][0]
    m, s = (t.requires_grad_() for t in double(mean, std))
    kl = prior.kl(m, s)
    assert kl.item() == pytest.approx(integrals.kl(prior, mean, std), rel=1e-8, abs=1e-8)
    by_mean, by_std = torch.autograd.grad(kl, [m, s])
    step = 1e-3 * std
    wanted = integrals.slope(lambda v: integrals.kl(prior, v, std), mean, step)
    assert by_mean.item() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    wanted = integrals.slope(lambda v: integrals.kl(prior, mean, v), std, step)
    assert by_std.item() == pytest.approx(wanted, rel=1e-5, abs=1e-6)


SIZES = [1e-12, 1e-6, 1e-2, 1.0, 1e3, 1e9]


@pytest.mark.parametrize("std", SIZES)
@pytest.mark.parametrize("mean", [0.0, *SIZES])
def test_expected_absolute_value_of_every_size(mean, std):
    m, s = (t.requires_grad_() for t in double(mean, std))
    found = expected_absolute(m, s)
    assert found.item() == pytest.approx(integrals.expectation(torch.abs, mean, std), rel=1e-9)
    by_mean, by_std = torch.autograd.grad(found, [m, s])
    assert by_mean.item() == pytest.approx(1 - 2 * stats.norm.cdf(-mean / std), abs=1e-12)
    assert by_std.item() == pytest.approx(2 * stats.norm.pdf(mean / std), abs=1e-12)
    mirrored = expected_absolute(-m, s)
    assert mirrored.item() == found.item()


def test_expected_absolute_value_is_twice_differentiable():
    mean, std = torch.randn(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64) + 0.1
    values = mean.requires_grad_(), std.requires_grad_()
    assert torch.autograd.gradcheck(expected_absolute, values)
    assert torch.autograd.gradgradcheck(expected_absolute, values)


@pytest.mark.parametrize(("mean", "log_std"), [(1.0, -80.0), (1e-30, -80.0), (1e15, 0.0), (0.0, 30.0), (1e4, -60.0)])
def test_laplace_is_finite_in_single_precision(mean, log_std):
    m, s = torch.tensor([mean], requires_grad=True), torch.tensor([log_std], requires_grad=True)
    kl = priors.Laplace(0.1).kl(m, s.exp(), s)
    exact = abs(mean) * 10 if log_std < 0 else integrals.expectation(torch.abs, mean, math.exp(log_std)) * 10
    assert kl.item() == pytest.approx(exact + math.log(0.2) - log_std - 0.5 * math.log(2 * math.pi * math.e), rel=1e-5)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(kl, [m, s]))


@settings(deadline=None, max_examples=20)
@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_laplace_against_torch(mean, std, scale):
    m, s = double(mean, std)
    kl = priors.Laplace(scale).kl(m, s)
    assert kl.item() >= 0
    wanted = D.kl_divergence(D.Normal(m, s), D.Laplace(0.0, torch.tensor(scale, dtype=torch.float64)))
    assert kl.item() == pytest.approx(wanted.item(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("prior", ESTIMATED.values(), ids=ESTIMATED.keys())
def test_estimates_are_unbiased_and_so_are_their_gradients(prior):
    n, m, s = 200_000, 0.6, 0.4
    mean = torch.full((n,), m, dtype=torch.float64, requires_grad=True)
    std = torch.full((n,), s, dtype=torch.float64, requires_grad=True)
    estimate = prior.kl(mean, std)  # the sum of n independent estimates
    gradients = torch.autograd.grad(estimate, [mean, std])
    value = integrals.kl(prior, m, s)
    slopes = [
        integrals.slope(lambda v: integrals.kl(prior, v, s), m, 1e-3),
        integrals.slope(lambda v: integrals.kl(prior, m, v), s, 1e-3),
    ]
    assert estimate.item() / n == pytest.approx(value, abs=5 / n**0.5)
    for gradient, slope in zip(gradients, slopes, strict=True):
        error = gradient.std().item() / n**0.5
        assert gradient.mean().item() == pytest.approx(slope, abs=4 * error)
        assert error < 0.02 * max(1, abs(slope))


@pytest.mark.parametrize("samples", [2, 3, 8])
def test_more_draws_estimate_better(samples):
    """Draws come in mirrored pairs, so two are better than two independent ones; none is counted twice."""
    mean, std = torch.full((1000,), 0.3, dtype=torch.float64), torch.full((1000,), 0.2, dtype=torch.float64)
    spreads, values = [], []
    for count in (1, samples):
        prior = priors.StudentT(3.0, 0.5, samples=count)
        each = torch.stack([prior.kl(mean, std) for _ in range(150)]) / len(mean)
        spreads.append(each.std().item())
        values.append(each.mean().item())
    assert spreads[1] < spreads[0] / samples**0.5 * 1.1
    if samples % 2 == 0:
        assert spreads[1] < 0.7 * spreads[0] / samples**0.5
    assert values == pytest.approx([integrals.kl(prior, 0.3, 0.2)] * 2, abs=4 * spreads[0] / 150**0.5)


@pytest.mark.parametrize("sigma2", [math.exp(-8), math.exp(-6), 1e-6])
def test_the_mixture_does_not_underflow(sigma2):
    prior = priors.ScaleMixture(0.5, 1.0, sigma2)
    w = torch.tensor([0.0, 1e-8, 1e-3, 0.1, 1.0, 40.0, 1e4, -1e4], requires_grad=True)
    found = prior.log_prob(w)
    (gradient,) = torch.autograd.grad(found.sum(), [w])
    assert torch.isfinite(found).all()
    assert torch.isfinite(gradient).all()
    # far out the wide one alone counts, and in the middle both
    wide = stats.norm(0, 1).logpdf([40, 1e4]) + math.log(0.5)
    assert found[5:7].tolist() == pytest.approx(wide.tolist(), rel=1e-6)
    assert gradient[5:].tolist() == pytest.approx([-40, -1e4, 1e4], rel=1e-6)
    assert found[0].item() == pytest.approx(math.log(0.5 * (1 + 1 / sigma2) / (2 * math.pi) ** 0.5), rel=1e-6)


def test_scales_are_not_variances_nor_logarithms():
    draws = {
        "laplace": (priors.Laplace(3.0), 3.0),
        "student": (priors.StudentT(200.0, 3.0), 3.0 * (2 / math.pi) ** 0.5),
        "mixture": (priors.ScaleMixture(0.5, 3.0, 1.0), 2.0 * (2 / math.pi) ** 0.5),
    }
    for prior, mean_size in draws.values():
        assert prior.sample((100_000,)).abs().mean().item() == pytest.approx(mean_size, rel=0.02)


def test_estimated_divergences_are_summed_over_weights():
    prior = priors.ScaleMixture(0.25, 1.0, 0.1)
    one = integrals.kl(prior, 0.3, 0.2)
    found = prior.kl(torch.full((300, 400), 0.3), torch.full((300, 400), 0.2))
    assert found.item() == pytest.approx(120_000 * one, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prior", [p for p, _ in OTHERS.values()] + [priors.LogUniform()], ids=repr)
def test_the_dtype_of_the_weights_is_kept(prior, dtype):
    mean, std = torch.randn(2, 3).to(dtype), torch.rand(2, 3).to(dtype) + 0.1
    assert prior.kl(mean, std).dtype == dtype
    assert prior.log_prob(mean).dtype == dtype
    assert prior.log_prob(mean).shape == (2, 3)


ROW = torch.tensor([0.5, 1.0, 2.0])
EVERYWHERE = [
    priors.Normal(ROW, ROW), priors.Laplace(ROW), priors.StudentT(ROW, ROW), priors.ScaleMixture(ROW / 3, ROW, ROW / 9),
    priors.LogUniform(), priors.Distribution(D.Cauchy(ROW, ROW)), priors.Distribution(D.Normal(ROW, ROW)),
]  # fmt: skip


@pytest.mark.parametrize("prior", EVERYWHERE, ids=lambda p: type(p).__name__)
def test_settings_follow_the_weights_to_their_device(prior):
    """Tensors without values take part in no operation with others."""
    mean, std = torch.zeros(2, 3, device="meta"), torch.ones(2, 3, device="meta")
    assert prior.kl(mean, std).device.type == "meta"
    assert prior.log_prob(mean).device.type == "meta"


@pytest.mark.parametrize("prior", EVERYWHERE, ids=lambda p: type(p).__name__)
def test_settings_of_single_weights_are_cut_with_them(prior):
    mask = torch.tensor([[True, False, True], [False, False, True]])
    weight = torch.randn(2, 3)
    assert torch.equal(prior.at(mask).log_prob(weight[mask]), prior.log_prob(weight)[mask])


BAD = [
    (lambda: priors.Laplace(0), ValueError, r"Laplace\(scale=...\) must be positive"),
    (lambda: priors.Laplace(math.inf), ValueError, "finite"),
    (lambda: priors.Laplace("1"), TypeError, "must be a number or a tensor"),
    (lambda: priors.Laplace(True), TypeError, "must be a number or a tensor"),
    (lambda: priors.StudentT(-1.0), ValueError, r"StudentT\(df=...\) must be positive"),
    (lambda: priors.StudentT(samples=0), ValueError, "number of draws"),
    (lambda: priors.ScaleMixture(1.0), ValueError, "between 0 and 1"),
    (lambda: priors.ScaleMixture(0.5, -0.0), ValueError, "standard deviation and must be positive"),
    (lambda: priors.ScaleMixture(0.5, 1.0, 0.0), ValueError, "standard deviation and must be positive"),
    (lambda: priors.ScaleMixture(0.5, 1.0, torch.tensor([0.1, -1.0])), ValueError, "sigma2"),
    (lambda: priors.Normal(1.0, math.nan), ValueError, "mean"),
    (lambda: priors.LogUniform().sample((2,)), ImproperPrior, "no draws"),
]


@pytest.mark.parametrize(("build", "error", "words"), BAD)
def test_bad_settings_are_refused(build, error, words):
    with pytest.raises(error, match=words):
        build()


WITHOUT_EVIDENCE = [priors.LogUniform(), priors.LogUniform("lower"), priors.RelevanceDetermination()]


@pytest.mark.parametrize("prior", [p for p, _ in OTHERS.values()] + WITHOUT_EVIDENCE, ids=repr)
def test_config_builds_it_again(prior):
    again = registered("prior", prior.name)(**prior.config())
    assert repr(again) == repr(prior)
    assert type(again) is type(prior)
