"""Every divergence against numerical integration, over the whole range of its parameters."""

from __future__ import annotations

import itertools
import math

import gate_oracles as oracles
import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats

from bayeslim import gates
from bayeslim.errors import UnsupportedModel
from bayeslim.gates import truncated_normal
from bayeslim.priors import Laplace, LogUniform, Normal


def found(gate: gates.Gate, **at: float) -> float:
    return gate.kl(oracles.parameters(gate, at)).item()


def over_a_gaussian(f, mean: float, std: float) -> float:
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    return float((f(mean + std * nodes) * weights).sum() / weights.sum())


@pytest.mark.parametrize("log_alpha", np.linspace(-9, 9, 13))
def test_normal_jeffreys(log_alpha):
    mean, std = -0.7, 0.7 * math.exp(log_alpha / 2)
    q = stats.norm(mean, std)
    ends = sorted({mean - 12 * std, 0.0, mean, mean + 12 * std})
    parts = [
        integrate.quad(lambda z: q.pdf(z) * math.log(abs(z)), *pair, limit=200)[0] for pair in itertools.pairwise(ends)
    ]
    wanted = sum(parts) - math.log(std) + 0.5 * (np.euler_gamma + math.log(2))
    assert found(gates.NormalJeffreys(), mean=mean, log_std=math.log(std)) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("log_alpha", np.linspace(-9, 9, 7))
def test_the_information_bottleneck_is_the_kl_to_the_best_prior(log_alpha):
    mean, std = 1.3, 1.3 * math.exp(log_alpha / 2)

    def kl(log_variance: float) -> float:
        p = stats.norm(0, math.exp(0.5 * log_variance))
        return over_a_gaussian(lambda z: stats.norm.logpdf(z, mean, std) - p.logpdf(z), mean, std)

    best = optimize.minimize_scalar(kl, bracket=(math.log(std**2), math.log(std**2 + 2 * mean**2))).fun
    gate = gates.InformationBottleneck()
    assert found(gate, mean=mean, log_std=math.log(std)) == pytest.approx(best, rel=1e-6, abs=1e-9)
    stronger = gates.InformationBottleneck(strength=3.0)
    assert found(stronger, mean=mean, log_std=math.log(std)) == pytest.approx(3 * best, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("scale", [1e-5, 0.3, 2.0])
@pytest.mark.parametrize(("mean", "log_std"), list(itertools.product([-8.0, 0.0, 5.0], [-4.5, -1.0, 0.5])))
def test_half_cauchy(scale, mean, log_std):
    """Each of the four factors by itself, the others where they start."""
    gate, std = gates.HalfCauchy(global_scale=scale), math.exp(log_std)

    def kl(of, log_mean: float, spread: float) -> float:
        excess = lambda y: stats.norm.logpdf(y, log_mean, spread) - y - of.logpdf(np.exp(y))  # noqa: E731
        return over_a_gaussian(excess, log_mean, spread)

    factors = {
        "a": stats.gamma(0.5),
        "b": stats.invgamma(0.5),
        "layer_a": stats.gamma(0.5, scale=scale**2),
        "layer_b": stats.invgamma(0.5),
    }
    start = {name: value.item() for name, value in gate.start(1).items()}
    usual = {name: kl(p, start[f"{name}_mean"], math.exp(start[f"{name}_log_std"])) for name, p in factors.items()}
    assert found(gate, **start) == pytest.approx(sum(usual.values()), rel=1e-7)
    for name, prior in factors.items():
        centre = mean + (2 * math.log(scale) if name == "layer_a" else 0)
        wanted = sum(usual.values()) - usual[name] + kl(prior, centre, std)
        at = start | {f"{name}_mean": centre, f"{name}_log_std": log_std}
        assert found(gate, **at) == pytest.approx(wanted, rel=1e-7)


def test_the_square_of_a_half_cauchy_variable_is_a_product():
    """The two factors of a half-Cauchy scale rely on this."""
    rng = np.random.default_rng(0)
    draws = np.sqrt(stats.gamma(0.5, scale=0.09).rvs(20_000, random_state=rng) / rng.gamma(0.5, size=20_000))
    assert stats.kstest(draws, stats.halfcauchy(scale=0.3).cdf).pvalue > 0.01


def test_a_layers_scale_is_counted_once():
    gate = gates.HalfCauchy()
    own = gate.start(5)
    one, two = (gate.kl(gate.pick(own, torch.arange(n))).item() for n in (1, 2))
    assert gate.kl(own).item() == pytest.approx(one + 4 * (two - one), rel=1e-5)


def on_the_interval(mean: float, std: float, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Points in log z and the probabilities that they stand for, from the unnormalised density alone."""
    peak = min(max(mean, low), high)
    slope = abs(peak - mean) / std**2
    width = 1 / (slope + 1 / std)
    steps = np.concatenate([[0.0], width * np.geomspace(1e-3, 1e3, 400)])
    nodes, weights = np.polynomial.legendre.leggauss(16)
    points, masses = [], []
    for side, room in ((-1, peak - low), (1, high - peak)):
        ends = np.unique(np.append(steps[steps < room], room))
        half = np.diff(ends) / 2
        away = ((ends[:-1] + half)[:, None] + half[:, None] * nodes).ravel()
        # (y − μ)² − (peak − μ)² without the squares that cancel
        exponent = -0.5 * away * (away + 2 * side * (peak - mean)) / std**2
        points.append(peak + side * away)
        masses.append(np.exp(exponent) * (half[:, None] * weights).ravel())
    return np.concatenate(points), np.concatenate(masses)


TRUNCATED_MEANS, TRUNCATED_LOG_STDS = (
    [-300.0, -20.5, -19.0, -5.0, -0.3, 0.0, 0.4, 6.0, 300.0],
    [-5.0, -2.0, 0.0, 2.0, 5.0],
)


@pytest.mark.parametrize("mean", TRUNCATED_MEANS)
def test_truncated_log_normal(mean):
    for log_std in TRUNCATED_LOG_STDS:
        gate, std = gates.TruncatedLogNormal(), math.exp(log_std)
        points, masses = on_the_interval(mean, std, -20.0, 0.0)
        total = masses.sum()
        peak = min(max(mean, -20.0), 0.0)
        log_density = -0.5 * (points - peak) * (points + peak - 2 * mean) / std**2 - math.log(total)
        share = masses / total
        own = oracles.parameters(gate, {"log_mean": mean, "log_std": log_std})
        assert gate.kl(own).item() == pytest.approx((share * log_density).sum() + math.log(20), rel=1e-6, abs=1e-7)
        z_mean = (share * np.exp(points)).sum()
        z_variance = (share * (np.exp(points) - z_mean) ** 2).sum()
        assert gate.mean(own).item() == pytest.approx(z_mean, rel=1e-6)
        ratio = z_mean / math.sqrt(z_variance)
        if ratio < 1e5:
            assert gate.variance(own).item() == pytest.approx(z_variance, rel=1e-5)
            assert gate.score(own).item() == pytest.approx(ratio, rel=1e-5)
        else:
            assert gate.score(own).item() > 1e4


@pytest.mark.parametrize("mean", TRUNCATED_MEANS)
def test_gradients_of_the_truncated_divergence(mean):
    """With g = −(y − μ)²/2σ², they are Cov(∂g/∂μ, g) and Cov(∂g/∂log σ, g) over y = log z."""
    for log_std in TRUNCATED_LOG_STDS:
        gate, std = gates.TruncatedLogNormal(), math.exp(log_std)
        points, masses = on_the_interval(mean, std, -20.0, 0.0)
        share = masses / masses.sum()
        peak = min(max(mean, -20.0), 0.0)
        g = -0.5 * (points - peak) * (points + peak - 2 * mean) / std**2
        g -= (share * g).sum()
        own = oracles.parameters(gate, {"log_mean": mean, "log_std": log_std})
        by_mean, by_log_std = torch.autograd.grad(gate.kl(own), list(own.values()))
        assert by_mean.item() == pytest.approx((share * (points - peak) / std**2 * g).sum(), rel=1e-5, abs=1e-8)
        assert by_log_std.item() == pytest.approx(-2 * (share * g**2).sum(), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("mean", TRUNCATED_MEANS)
def test_draws_of_truncated_log_normals_in_the_tails(mean):
    for log_std in TRUNCATED_LOG_STDS:
        torch.manual_seed(0)
        gate, std = gates.TruncatedLogNormal(), math.exp(log_std)
        z = gate.draw(oracles.parameters(gate, {"log_mean": mean, "log_std": log_std}), (4000,)).detach().flatten()
        points, masses = on_the_interval(mean, std, -20.0, 0.0)
        order = np.argsort(points)
        below = np.cumsum(masses[order]) / masses.sum()
        assert ((z >= math.exp(-20)) & (z <= 1)).all()
        uniform = np.interp(z.log().numpy(), points[order], below)
        assert stats.kstest(uniform, "uniform").pvalue > 1e-3


def test_the_inverse_of_the_log_distribution_function():
    x = -torch.cat([torch.linspace(0, 60, 500), torch.logspace(1.6, 4, 100)]).double()
    found = truncated_normal.inverse_log_ndtr(torch.special.log_ndtr(x))
    assert ((found - x).abs() < 1e-7 / x.abs().clamp(min=1)).all()  # the tail's own scale is 1/|x|


@pytest.mark.parametrize("log_alpha", [-6.0, -1.0, 0.0, 2.0, 7.0])
def test_hard_concrete(log_alpha):
    gate = gates.HardConcrete(cost=2.5)
    survival = oracles.expectation(lambda z: (z > 0).astype(float), gate, {"log_alpha": log_alpha})
    assert found(gate, log_alpha=log_alpha) == pytest.approx(2.5 * survival, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("logit", [-30.0, -3.0, 0.0, 1.0, 30.0])
def test_bernoulli(logit):
    p = np.array([special.expit(logit), special.expit(-logit)])
    wanted = (special.xlogy(p, p) + p * math.log(2)).sum()
    assert found(gates.Bernoulli(learn="concrete"), logit=logit) == pytest.approx(wanted, abs=1e-12)
    fixed = gates.Bernoulli(rate=0.2)
    assert found(fixed, logit=logit) == pytest.approx(0.2 * math.log(0.4) + 0.8 * math.log(1.6))


def weights(dtype=torch.float64):
    groups = torch.arange(3)[:, None]
    return torch.randn(3, 4, dtype=dtype), torch.rand(3, 4, dtype=dtype) + 0.1, groups


def test_centred_weights_are_compared_with_every_scale_there_may_be():
    gate = gates.HalfCauchy(centred=True)
    own = oracles.parameters(gate, oracles.half_cauchy(0.3, 0.2, -0.5, 0.1, -1.5, -1.2, -2.0, -1.8), 3)
    own["a_mean"].data += torch.tensor([0.0, 1.0, -2.0])
    mean, std, groups = weights()
    prior = Normal(torch.linspace(0.5, 2, 4).double())
    log_z = 0.5 * (own["a_mean"] + 0.2 - 0.5 + 0.1).detach().numpy()
    spread = math.sqrt(0.25 * sum(math.exp(2 * v) for v in (-1.5, -1.2, -2.0, -1.8)))
    total = points = 0.0
    for i, j in itertools.product(range(3), range(4)):
        scale = prior.std[j].item()

        def against(log_scale, i=i, j=j, scale=scale):
            p = np.exp(log_scale) * scale
            return np.log(p / std[i, j].item()) + (mean[i, j].item() ** 2 + std[i, j].item() ** 2) / (2 * p**2) - 0.5

        def as_a_point(log_scale, i=i, j=j, scale=scale):
            return -stats.norm.logpdf(mean[i, j].item(), 0, np.exp(log_scale) * scale)

        total += over_a_gaussian(against, log_z[i], spread)
        points += over_a_gaussian(as_a_point, log_z[i], spread)
    assert gate.weight_kl(own, mean, std, groups, prior).item() == pytest.approx(total, rel=1e-9)
    assert gate.weight_kl(own, mean, None, groups, prior).item() == pytest.approx(points, rel=1e-9)
    assert gates.HalfCauchy().weight_kl(own, mean, std, groups, prior) is None
    with pytest.raises(UnsupportedModel, match="scale of a Normal prior"):
        gate.weight_kl(own, mean, std, groups, LogUniform())


def test_centred_normal_jeffreys():
    """The scale's divergence by integration, up to the prior's constant; the weights', in expectation over z."""
    gate = gates.NormalJeffreys(centred=True)
    for log_mean, log_std in itertools.product([-8.0, 0.0, 5.0], [-4.5, -1.0, 0.5]):
        spread = math.exp(log_std)
        # q(z) = q(log z) / z, and p(z) = 1/z
        excess = lambda y: stats.norm.logpdf(y, log_mean, spread) - y + y  # noqa: B023, E731
        wanted = over_a_gaussian(excess, log_mean, spread)
        assert found(gate, log_mean=log_mean, log_std=log_std) == pytest.approx(wanted, rel=1e-9)
    own = oracles.parameters(gate, {"log_mean": 0.1, "log_std": -1.2}, 3)
    own["log_mean"].data += torch.tensor([0.0, 1.0, -2.0])
    mean, std, groups = weights()
    prior = Normal(0.7)
    total = 0.0
    for i, j in itertools.product(range(3), range(4)):
        centre, square = own["log_mean"][i].item(), mean[i, j].item() ** 2 + std[i, j].item() ** 2

        def against(log_scale, i=i, j=j, square=square):
            p = np.exp(log_scale) * 0.7
            return np.log(p / std[i, j].item()) + square / (2 * p**2) - 0.5

        total += over_a_gaussian(against, centre, math.exp(-1.2))
    assert gate.weight_kl(own, mean, std, groups, prior).item() == pytest.approx(total, rel=1e-9)
    assert gates.NormalJeffreys().weight_kl(own, mean, std, groups, prior) is None
    with pytest.raises(UnsupportedModel, match="scale of a Normal prior"):
        gate.weight_kl(own, mean, std, groups, LogUniform())
    with pytest.raises(UnsupportedModel, match="needs weights with a posterior"):
        gate.weight_kl(own, mean, None, groups, prior)


def test_the_best_centred_scale_is_the_one_that_is_said():
    """V = 1/2n and e^(2m − 2v) = S/n, and ½ Σ log(S / n σ²) of what a group costs, whatever its scale."""
    gate = gates.NormalJeffreys(centred=True)
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.randn(1, 6, generator=generator).double(), torch.rand(1, 6, generator=generator).double() + 0.1
    square, groups, prior = (
        (mean.square() + std.square()).sum().item(),
        torch.zeros(1, 6, dtype=torch.long),
        Normal(1.0),
    )
    costs = []
    for size in (1.0, 1e-3):
        least = optimize.minimize(
            lambda at, size=size: (
                found(gate, log_mean=at[0], log_std=at[1])
                + gate.weight_kl(
                    oracles.parameters(gate, {"log_mean": at[0], "log_std": at[1]}),
                    size * mean,
                    size * std,
                    groups,
                    prior,
                ).item()
            ),
            [0.5 * math.log(size**2 * square / 6), -1.0],
        )
        m, v = least.x[0], math.exp(2 * least.x[1])
        assert v == pytest.approx(1 / 12, rel=1e-3)
        assert math.exp(2 * m - 2 * v) == pytest.approx(size**2 * square / 6, rel=1e-3)
        costs.append(least.fun)
    assert costs[0] == pytest.approx(costs[1], abs=1e-6)
    noise = std.expand(1, 6)
    wanted = 0.5 * (math.log(square / 6) - 2 * noise.log()).sum().item()
    constant = -(0.5 * math.log(1 / 12) + 0.5 * (1 + math.log(2 * math.pi))) + 6 / 12
    assert costs[0] == pytest.approx(wanted + constant, abs=1e-6)


def test_weights_under_dropout_cost_their_expected_square():
    gate = gates.Bernoulli(learn="concrete")
    own = {"logit": torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)}
    mean, std, groups = weights()
    prior = Normal(0.6)
    keep = torch.sigmoid(-own["logit"]).detach()[:, None]
    effective = mean / keep
    # Weights that are points: E[w²]/2s², and the constant of the density as if nothing were dropped.
    energy = (keep * effective.square() / (2 * 0.36)).sum().item() + 12 * math.log(0.6 * math.sqrt(2 * math.pi))
    assert gate.weight_kl(own, mean, None, groups, prior).item() == pytest.approx(energy, rel=1e-12)
    spread = (keep * (effective.square() + (std / keep).square()) / (2 * 0.36)).sum()
    wanted = spread.item() - (0.5 + std.log() - math.log(0.6)).sum().item()
    assert gate.weight_kl(own, mean, std, groups, prior).item() == pytest.approx(wanted, rel=1e-12)
    assert gate.weight_kl(own, mean, std, groups, Laplace(1.0)) is None
