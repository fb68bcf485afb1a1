"""Mixtures of networks against densities written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributions

from bayeslim.errors import ShapeMismatch
from bayeslim.io.registry import registered
from bayeslim.posteriors import Diagonal, Mixture, group_saliency
from bayeslim.priors import Normal
from bayeslim.prune import criteria, default_criterion

SHAPES = {"a": (2, 2), "b": (3,)}
LOG_WEIGHTS = torch.tensor([0.2, 0.5, 0.3]).double().log()


def posterior(seed: int = 0) -> Mixture:
    generator = torch.Generator().manual_seed(seed)
    means = {n: torch.randn(3, *s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
    stds = {n: torch.rand(3, *s, generator=generator, dtype=torch.float64) + 0.2 for n, s in SHAPES.items()}
    return Mixture(LOG_WEIGHTS, means, stds)


def flat(params) -> torch.Tensor:
    return torch.cat(
        [params[n].reshape(*params[n].shape[: params[n].ndim - len(s)], -1) for n, s in SHAPES.items()], -1
    )


def oracle(q: Mixture) -> distributions.Distribution:
    parts = distributions.Independent(distributions.Normal(flat(q.means), flat(q.stds)), 1)
    return distributions.MixtureSameFamily(distributions.Categorical(logits=LOG_WEIGHTS), parts)


def test_is_the_joint_mixture():
    q = posterior()
    exact = oracle(q)
    torch.testing.assert_close(flat(q.mean), exact.mean)
    torch.testing.assert_close(flat(q.variance), exact.variance)
    for _ in range(5):
        w = q.sample()
        torch.testing.assert_close(q.log_prob(w), exact.log_prob(flat(w)))
    factorised = sum(
        distributions.MixtureSameFamily(
            distributions.Categorical(logits=LOG_WEIGHTS), distributions.Normal(flat(q.means).T[i], flat(q.stds).T[i])
        ).log_prob(flat(w)[i])
        for i in range(7)
    )
    assert abs(q.log_prob(w) - factorised) > 1e-3


def test_one_component_is_drawn_for_all_weights():
    means = {"a": torch.tensor([-5.0, 5.0])[:, None], "b": torch.tensor([-5.0, 5.0])[:, None]}
    q = Mixture(torch.tensor([0.25, 0.75]).log(), means, {n: torch.full((2, 1), 0.1) for n in means})
    draws = q.sample(4000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draws["a"] > 0, draws["b"] > 0)
    assert (draws["a"] > 0).double().mean().item() == pytest.approx(0.75, abs=0.03)
    assert q.mode["a"].item() == 5.0
    assert q.mean["a"].item() == pytest.approx(2.5)


MASKS = {"a": torch.tensor([[True, False], [True, True]]), "b": torch.tensor([False, True, True])}


def test_the_conditional_is_the_joint_along_the_zeros():
    q = posterior()
    given = q.condition(MASKS)
    gaps = []
    for seed in range(6):
        w = {n: value * MASKS[n] for n, value in posterior(seed + 1).mean.items()}
        gaps.append((given.log_prob(w) - q.log_prob(w)).item())
    assert max(gaps) - min(gaps) < 1e-9  # they differ by the constant −log q_S(0)
    (cost,) = criteria.density.unit_density(q, {}, [{"a": torch.tensor([1]), "b": torch.tensor([0])}])
    assert gaps[0] == pytest.approx(cost.item())
    assert not torch.allclose(given.weights, q.weights, atol=1e-2)
    assert given.log_prob(q.mean) == -math.inf
    assert not given.sample(5)["a"][:, 0, 1].any()
    twice = q.condition({"a": MASKS["a"]}).condition(MASKS)
    torch.testing.assert_close(twice.weights, given.weights)


def test_zeros_out_of_reach_prefer_no_component():
    points = Mixture(LOG_WEIGHTS, {"w": torch.ones(3, 2)}, {"w": torch.zeros(3, 2)})
    given = points.condition({"w": torch.tensor([True, False])})
    torch.testing.assert_close(given.weights, points.weights)


def test_weights_as_far_apart_as_they_come_stay_finite():
    q = Mixture(torch.zeros(2), {"w": torch.tensor([[0.0] * 9, [300.0] * 9])}, {"w": torch.full((2, 9), 1e-3)})
    given = q.condition({"w": torch.tensor([False] * 8 + [True])})
    assert given.weights.tolist() == [1.0, 0.0]
    assert torch.isfinite(given.sample(3)["w"]).all()


def bimodal() -> Mixture:
    """The first weight is −1 or 1, the second is about zero."""
    means = torch.tensor([[-1.0, 0.1], [1.0, -0.1]]).double()
    return Mixture(torch.zeros(2), {"w": means}, {"w": torch.full((2, 2), 0.2).double()})


def test_scores_see_the_modes():
    q = bimodal()
    prior = {"w": Normal(1.0)}
    density = criteria.density.density(q, prior)["w"]
    exact = [
        -math.log(0.5 * sum(distributions.Normal(m, 0.2).log_prob(torch.tensor(0.0)).exp().item() for m in pair))
        for pair in ((-1.0, 1.0), (0.1, -0.1))
    ]
    assert density.tolist() == pytest.approx(exact, rel=1e-5)
    mass = criteria.mass.mass(q, prior, epsilon=0.5)["w"]
    inside = [
        0.5 * sum((n.cdf(torch.tensor(0.5)) - n.cdf(torch.tensor(-0.5))).item() for n in map(normal, pair))
        for pair in ((-1.0, 1.0), (0.1, -0.1))
    ]
    assert mass.tolist() == pytest.approx([-math.log(p) for p in inside], rel=1e-4)
    lost = criteria.savage_dickey.savage_dickey(q, prior)["w"]
    torch.testing.assert_close(lost, density - 0.5 * math.log(2 * math.pi))
    assert density[0] > density[1]
    assert criteria.snr.snr(q, prior)["w"][0] == 0  # which is why density is what "auto" stands for
    assert default_criterion(q, units=False) == default_criterion(q, units=True) == "density"


def normal(mean: float) -> distributions.Normal:
    return distributions.Normal(mean, 0.2)


def test_units_are_scored_by_their_joint():
    q = posterior()
    group = {"a": torch.tensor([0, 3]), "b": torch.tensor([1])}
    places = torch.tensor([0, 3, 5])
    mean, std = flat(q.means)[:, places], flat(q.stds)[:, places]
    exact = (LOG_WEIGHTS + distributions.Normal(mean, std).log_prob(torch.zeros(3).double()).sum(1)).logsumexp(0)
    torch.testing.assert_close(criteria.density.unit_density(q, {}, [group])[0], -exact)
    parts = distributions.Normal(mean, std)
    inside = (parts.cdf(torch.tensor(0.01)) - parts.cdf(torch.tensor(-0.01))).prod(1)
    mass = criteria.mass.unit_mass(q, {}, [group])[0]
    assert mass.item() == pytest.approx(-math.log((LOG_WEIGHTS.exp() * inside).sum().item()), rel=1e-5)
    priors = {n: Normal(1.0) for n in SHAPES}
    torch.testing.assert_close(
        criteria.savage_dickey.unit_savage_dickey(q, priors, [group])[0], -exact - 1.5 * math.log(2 * math.pi)
    )
    with pytest.raises(TypeError, match="Gaussian"):
        group_saliency(q, [group])


def test_weights_cut_before_score_lowest():
    given = posterior().condition(MASKS)
    for scores in (criteria.density.density(given, {}), criteria.mass.mass(given, {})):
        assert (scores["a"][~MASKS["a"]] < scores["a"][MASKS["a"]].min()).all()


def test_comes_back_from_its_tensors():
    q = posterior().condition(MASKS)
    again = registered("posterior", q.kind).restore(q.config(), q.tensors())
    draws = [one.sample(4, generator=torch.Generator().manual_seed(0)) for one in (q, again)]
    assert all(torch.equal(draws[0][n], draws[1][n]) for n in SHAPES)
    assert "3 components with weights" in repr(again)


def test_components_are_posteriors():
    q = posterior()
    assert all(isinstance(component, Diagonal) for component in q.components)
    assert torch.equal(q.components[1].mean["a"], q.means["a"][1])


def test_refuses_shapes_that_do_not_fit():
    q = posterior()
    with pytest.raises(ShapeMismatch, match="one weight a component"):
        Mixture(torch.zeros(3, 1), q.means, q.stds)
    with pytest.raises(ShapeMismatch, match="each of 2 components"):
        Mixture(torch.zeros(2), q.means, q.stds)
