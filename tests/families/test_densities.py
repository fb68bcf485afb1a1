"""Every family's differentiable density against the posterior it stands for, and its KL against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributions, nn

import bayeslim as bl
from bayeslim import families, likelihoods, priors
from bayeslim.errors import UnsupportedModel
from oracles import gaussian_kl

FAMILIES = {
    "diagonal": families.DiagonalGaussian(0.3),
    "dropout": families.DropoutGaussian(0.3),
    "dropout of units": families.DropoutGaussian(0.3, per="unit", largest=2.0),
    "zero mean": families.ZeroMean(0.3),
    "lowrank": families.LowRankGaussian(3, initial_std=0.3),
    "mixture": families.MixtureOfGaussians(3, initial_std=0.3),
}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
MASK = torch.tensor([[True, False, True], [True, True, False], [False, True, True], [True, True, True]])


def network(family: families.Family, cut: bool = False, dtype: torch.dtype = torch.float64) -> bl.Bayesian:
    """A small network whose family has no two parameters alike."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    bnn = bl.bayesianize(model, bl.Variational(family), likelihood=likelihoods.Categorical(), sites="all", num_data=20)
    for name, parameter in bnn.model.named_parameters():
        if name not in bnn.sites.names:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return bl.prune(bnn, bl.Plan({"0.weight": MASK})) if cut else bnn


@every_family
@pytest.mark.parametrize("cut", [False, True])
def test_the_density_of_a_draw_is_the_posteriors(family, cut):
    bnn = network(family, cut)
    q, posterior = family.density(bnn.model, bnn.sites.names, bnn.masks), bnn.posterior_
    for component in range(len(q.log_weights)):
        draw = q.draw(q.noise(), component)
        torch.testing.assert_close(q.log_prob(draw).detach(), posterior.log_prob(draw.weights).detach())
        if cut:
            assert not draw.weights["0.weight"][~MASK].any()


@every_family
def test_draws_have_the_posteriors_moments(family):
    bnn = network(family)
    q, posterior = family.density(bnn.model, bnn.sites.names, {}), bnn.posterior_
    shares, total = q.log_weights.exp().detach(), 0.0
    with torch.no_grad():
        for component, share in enumerate(shares):
            draws = torch.stack([q.draw(q.noise(), component).weights["0.weight"] for _ in range(400)])
            total = total + share * draws.mean(0)
    error = (posterior.variance["0.weight"] / 400).sqrt()
    assert ((total - posterior.mean["0.weight"]).abs() < 5 * error).all()
    draws = torch.stack([bnn.method.draw(bnn, torch.eye(3).double()) for _ in range(10)])
    assert draws.std(0).min() > 0


@every_family
def test_gradients_of_the_density_are_those_of_its_formula(family):
    """The total derivative in every parameter, through the draw and through q, against finite differences."""
    bnn = network(family)
    noise = family.density(bnn.model, bnn.sites.names, {}).noise()

    def value() -> torch.Tensor:
        q = family.density(bnn.model, bnn.sites.names, {})
        draw = q.draw(noise, len(q.log_weights) - 1)
        return q.log_prob(draw) + sum(w.square().sum() for w in draw.weights.values())

    parameters = [p for p in bnn.model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(value(), parameters)
    for parameter, slope in zip(parameters, slopes, strict=True):
        entries = parameter.data.view(-1)
        for index in {0, len(entries) - 1}:
            before = entries[index].item()
            ends = []
            for step in (1e-5, -1e-5):
                entries[index] = before + step
                ends.append(value().item())
            entries[index] = before
            assert slope.view(-1)[index].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("cut", [False, True])
def test_the_kl_of_correlated_weights_is_exact(cut):
    bnn = network(FAMILIES["lowrank"], cut)
    q = bnn.posterior_
    kept = torch.cat([bnn.masks.get(n, torch.ones_like(m, dtype=torch.bool)).flatten() for n, m in q.mean.items()])
    mean = torch.cat([m.flatten() for m in q.mean.values()])[kept]
    U = torch.cat([u.flatten(1) for u in q.factor.values()], 1)[:, kept]
    covariance = torch.diag(torch.cat([s.flatten() for s in q.own_std.values()])[kept].square()) + U.T @ U
    prior = torch.eye(len(mean), dtype=torch.float64)
    density = FAMILIES["lowrank"].density(bnn.model, bnn.sites.names, bnn.masks)
    exact = gaussian_kl(mean, covariance, torch.zeros_like(mean), prior)
    torch.testing.assert_close(density.kl(bnn.priors).detach(), exact)
    bnn.loss((torch.randn(5, 3).double(), torch.zeros(5, dtype=torch.int64)))
    assert bnn.terms.kl.item() == pytest.approx(exact.item(), rel=1e-9)


class Sharp(priors.Prior):
    """exp(−|w|)/2, with no closed form of a KL."""

    name = "sharp"

    def log_prob(self, weight):
        return -weight.abs() - math.log(2)


def test_the_kl_to_any_prior_is_that_of_its_draws():
    bnn = network(FAMILIES["lowrank"])
    q = FAMILIES["lowrank"].density(bnn.model, bnn.sites.names, {})
    sharp = dict.fromkeys(bnn.priors, Sharp())
    with torch.no_grad():
        closer = torch.stack([q.kl(sharp) for _ in range(300)])
        plain = []
        for _ in range(300):
            draw = q.draw(q.noise())
            log_p = sum(distributions.Laplace(0.0, 1.0).log_prob(w).sum() for w in draw.weights.values())
            plain.append(q.log_prob(draw) - log_p)
        plain = torch.stack(plain)
    error = ((closer.var() + plain.var()) / 300).sqrt()
    assert abs(closer.mean() - plain.mean()) < 4 * error
    assert closer.var() < plain.var()


def test_directions_far_larger_than_the_spreads_lose_no_digits():
    """Single precision against double, at U = 1 and σ = 1e-4."""
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(1)
        bnn = network(families.LowRankGaussian(2), dtype=torch.float64).to(dtype)
        for name in bnn.sites.names:
            bnn.model.get_parameter(f"{name}_log_std").data.fill_(math.log(1e-4))
            factor = bnn.model.get_parameter(f"{name}_factor")
            factor.data.copy_(torch.randn(factor.shape, generator=torch.Generator().manual_seed(2)))
        q = bnn.method.family.density(bnn.model, bnn.sites.names, {})
        noise = {n: torch.ones_like(p) for n, p in q.stds.items()} | {"": torch.full((2,), 0.5, dtype=dtype)}
        found.append(q.log_prob(q.draw(noise)).item())
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_the_users_own_tensor_is_the_mean_of_the_mixture():
    bnn = network(FAMILIES["mixture"])
    posterior = bnn.posterior_
    assert posterior.weights.max() - posterior.weights.min() > 0.05
    for name in bnn.sites.names:
        torch.testing.assert_close(posterior.mean[name], bnn.model.get_parameter(name).detach())
    apart = (posterior.means["0.weight"][0] - posterior.means["0.weight"][1]).abs().mean()
    assert apart > 0.2 * posterior.mean["0.weight"].abs().mean()


def test_gradients_reach_the_mixtures_weights():
    """Of Σ_c π_c E_c[log p(D, w) − log q(w)], against finite differences with the same noise."""
    bnn = network(FAMILIES["mixture"])
    batch = torch.randn(6, 3).double(), torch.randint(2, (6,))
    logits = bnn.model.mixture_logits

    def loss() -> torch.Tensor:
        torch.manual_seed(3)
        return bnn.loss(batch)

    (slope,) = torch.autograd.grad(loss(), logits)
    for index in range(3):
        ends = []
        for step in (1e-5, -2e-5):
            logits.data[index] += step
            ends.append(loss().item())
        logits.data[index] += 1e-5
        assert slope[index].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-6)


@every_family
def test_half_precision_networks_keep_the_family_in_single_precision(family):
    bnn = network(family, dtype=torch.bfloat16)
    x = torch.randn(5, 3).bfloat16()
    bnn.loss((x, torch.zeros(5, dtype=torch.int64))).backward()
    added = [p for name, p in bnn.model.named_parameters() if name not in bnn.sites.names]
    assert {p.dtype for p in added} == {torch.float32}
    assert bnn.posterior_.sample()["0.weight"].dtype == torch.bfloat16
    assert all(torch.isfinite(p.grad).all() for p in bnn.parameters() if p.requires_grad)
    assert torch.isfinite(bl.predict(bnn, x, samples=2).mean).all()


@every_family
def test_nothing_of_a_family_is_left_in_the_mean_network(family):
    bnn = network(family)
    assert set(bnn.mean_network().state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    with pytest.raises(UnsupportedModel, match="already exists"):
        bl.bayesianize(bnn.model, bl.Variational(family), likelihood=likelihoods.Categorical())


def test_settings_are_checked():
    for wrong in (0, -1, 2.0, None):
        with pytest.raises((ValueError, TypeError), match="rank"):
            families.LowRankGaussian(rank=wrong)
        with pytest.raises((ValueError, TypeError), match="components"):
            families.MixtureOfGaussians(components=wrong)
    for family in (families.DiagonalGaussian, families.LowRankGaussian, families.MixtureOfGaussians):
        with pytest.raises(ValueError, match="initial_std"):
            family(initial_std=0.0)
    with pytest.raises(ValueError, match="spread"):
        families.MixtureOfGaussians(spread=0.0)
    with pytest.raises(TypeError, match="family"):
        bl.Variational(family="mixture")
    for family in (families.LowRankGaussian(), families.MixtureOfGaussians()):
        assert bl.Variational(family).noise_at == "shared"
        for estimator in ("local", "flipout"):
            with pytest.raises(ValueError, match='estimator="auto" or "shared"'):
                bl.Variational(family, estimator=estimator)
