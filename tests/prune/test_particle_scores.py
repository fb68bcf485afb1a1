"""Scores across particles, against their definitions written out, weight by weight and unit by unit."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from scipy.stats import norm

from bayeslim.posteriors import Diagonal, Mixture, Particles
from bayeslim.priors import Normal
from bayeslim.prune import CRITERIA, criteria, default_criterion


def particles(count=6, seed=0) -> Particles:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 4, 3, generator=generator, dtype=torch.float64)
    values[:, 0, 0] = 0  # cut
    values[:, 1, 0] = 0.7  # known
    values[:, 2, 0] *= 0.02
    return Particles({"w": values, "b": torch.randn(count, 4, generator=generator, dtype=torch.float64)})


def kernel_density(values) -> float:
    """Written out with scipy's normal density."""
    width = 1.06 * values.std().item() * len(values) ** -0.2
    return -math.log(sum(norm.pdf(0, loc=v.item(), scale=width) for v in values) / len(values))


DEFINITIONS = {
    "snr": lambda v: (v.mean().abs() / v.std()).item(),
    "magnitude": lambda v: v.abs().mean().item(),
    "curvature": lambda v: (v.mean() ** 2 / v.var() / 2).item(),
    "mass": lambda v: -math.log(near) if (near := sum(abs(x.item()) < 0.01 for x in v) / len(v)) else math.inf,
    "density": kernel_density,
    "savage_dickey": lambda v: kernel_density(v) + norm.logpdf(0, scale=0.5),
    "sign_stability": lambda v: abs(sum((x > 0).item() - (x < 0).item() for x in v)) / len(v),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_weight_scores_are_their_definitions(name):
    q = particles()
    scores = CRITERIA[name].weights(q, {n: Normal(0.5) for n in q.names})
    for parameter in q.names:
        assert scores[parameter].dtype == torch.float64
        flat = q.values[parameter].flatten(1)
        for place, found in enumerate(scores[parameter].flatten().tolist()):
            if parameter == "w" and place in (0, 3):
                continue  # points, below
            assert found == pytest.approx(DEFINITIONS[name](flat[:, place]), rel=1e-9), (parameter, place)


def test_points_score_lowest_at_zero_and_highest_elsewhere():
    q = particles()
    for name in ("snr", "density", "mass", "sign_stability", "curvature"):
        scores = CRITERIA[name].weights(q, {})["w"]
        assert scores[0, 0] == scores.min(), name
        assert scores[1, 0] == scores.max(), name
        assert not scores.isnan().any()
    alone = Particles({"w": torch.tensor([[0.0, 0.3]])})
    assert criteria.density.density(alone, {})["w"].tolist() == [-math.inf, math.inf]
    assert criteria.snr.snr(alone, {})["w"].tolist() == [0, math.inf]


def test_what_counts_as_near_zero_can_be_said():
    q = particles()
    near = functools.partial(criteria.mass.mass, epsilon=0.5)(q, {})["b"]
    expected = -(q.values["b"].abs() < 0.5).double().mean(0).log()
    assert torch.equal(near, expected)


def test_a_kernel_density_finds_the_density_of_many_particles():
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.tensor([0.5, -1.0, 0.0]).double(), torch.tensor([1.0, 0.7, 2.0]).double()
    draws = mean + std * torch.randn(20_000, 3, generator=generator, dtype=torch.float64)
    exact = criteria.density.density(Diagonal({"w": mean}, {"w": std}), {})["w"]
    torch.testing.assert_close(criteria.density.density(Particles({"w": draws}), {})["w"], exact, rtol=0, atol=0.05)


def test_sign_stability_of_gaussians_is_that_of_their_draws():
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.tensor([0.5, -1.0, 0.0, 3.0]).double(), torch.tensor([1.0, 0.7, 2.0, 0.0]).double()
    gaussian = Diagonal({"w": mean}, {"w": std})
    other = Diagonal({"w": -2 * mean}, {"w": std + 0.1})
    pair = Mixture(
        torch.tensor([0.3, 0.7]).log(),
        {"w": torch.stack([gaussian.mean["w"], other.mean["w"]])},
        {"w": torch.stack([gaussian.std["w"], other.std["w"]])},
    )
    for posterior in (gaussian, pair):
        draws = Particles(posterior.sample(100_000, generator=generator))
        exact, found = (criteria.sign_stability.sign_stability(q, {})["w"] for q in (posterior, draws))
        torch.testing.assert_close(found, exact, rtol=0, atol=0.015)


def group_of_everything() -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([1, 4, 11]), "b": torch.tensor([2])}


def test_unit_scores_are_their_definitions():
    q = particles()
    group = group_of_everything()
    rows = torch.cat([q.values[n].flatten(1)[:, i] for n, i in group.items()], 1)
    mean = rows.mean(0)
    projected = torch.stack([row @ mean / mean.norm() for row in rows])
    expected = {
        "magnitude": sum(row.norm().item() for row in rows) / 6,
        "snr": mean.norm().item() / math.sqrt(sum(rows[:, i].var().item() for i in range(4))),
        "density": kernel_density(projected),
        "sign_stability": (sum(row / row.norm() for row in rows) / 6).norm().item(),
    }
    for name, value in expected.items():
        units = CRITERIA[name].units
        assert units is not None
        assert units(q, {}, [group]).tolist() == pytest.approx([value], rel=1e-6), name
    small = Particles({"w": torch.tensor([[0.009, 0.011], [0.001, 0.002], [0.5, 0.0], [0.0, 0.0]])})
    near = criteria.mass.unit_mass(small, {}, [{"w": torch.tensor([0, 1])}])
    assert near.item() == pytest.approx(-math.log(2 / 4))  # the first has a root mean square of 0.01005


@pytest.mark.parametrize("name", ["snr", "density", "mass", "sign_stability", "magnitude"])
def test_a_unit_of_one_weight_scores_as_the_weight(name):
    q = particles()
    weights = CRITERIA[name].weights(q, {})["w"].flatten()
    units = CRITERIA[name].units
    assert units is not None
    found = units(q, {}, [{"w": torch.tensor([place])} for place in range(12)])
    torch.testing.assert_close(found, weights, rtol=1e-6, atol=1e-12, check_dtype=False)


def test_units_that_are_cut_score_lowest():
    q = particles().condition({"w": torch.tensor([[True] * 3, [False] * 3, [True] * 3, [True] * 3])})
    groups = [{"w": torch.arange(3 * row, 3 * row + 3)} for row in range(4)]
    for name in ("magnitude", "snr", "density", "mass", "sign_stability"):
        units = CRITERIA[name].units
        assert units is not None
        found = units(q, {}, groups)
        assert not found.isnan().any()
        assert found[1] == found.min(), name


def test_scores_that_need_a_joint_density_are_refused():
    q = particles()
    for name in ("curvature", "savage_dickey"):
        units = CRITERIA[name].units
        assert units is not None
        with pytest.raises(TypeError, match='criterion="'):
            units(q, {n: Normal(1.0) for n in q.names}, [group_of_everything()])
    with pytest.raises(TypeError, match='use criterion="snr"'):
        criteria.sign_stability.unit_sign_stability(Diagonal(q.mean, q.std), {}, [group_of_everything()])
    assert default_criterion(q, True) == default_criterion(q, False) == "magnitude"


@pytest.mark.parametrize("granularity", ["weight", "unit"])
def test_signs_that_differ_between_networks_do_not_make_a_weight_small(granularity):
    """The mean of an ensemble is no network, and its size says nothing of what the networks need."""
    values = torch.tensor([[[3.0, 0.1]], [[-3.0, 0.1]]]).expand(2, 2, 2).clone()
    values[:, 1] = 0.5
    q = Particles({"w": values})
    assert criteria.magnitude.magnitude(q, {})["w"].tolist() == [[3.0, pytest.approx(0.1)], [0.5, 0.5]]
    if granularity == "unit":
        rows = [{"w": torch.tensor([0, 1])}, {"w": torch.tensor([2, 3])}]
        assert criteria.magnitude.unit_magnitude(q, {}, rows).argmin() == 1
