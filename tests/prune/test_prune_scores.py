import functools

import mpmath
import pytest
import torch
from given_posteriors import FAMILIES, covariance_of, dense, diagonal, flat, flat_places, given, kronecker, two_layers
from hypothesis import given as forall
from hypothesis import settings
from hypothesis import strategies as st

import bayeslim as bl
from bayeslim.errors import ImproperPrior
from bayeslim.io.registry import unregister
from bayeslim.posteriors import Conditioned, Dense, Diagonal
from bayeslim.priors import Normal, Prior
from bayeslim.prune import CRITERIA, Criterion, criteria, default_criterion
from bayeslim.prune.criteria.group_log_det import group_log_det, random_groups
from bayeslim.prune.smaller_kronecker import reduced
from oracles import linear_regression

OF_GATES = ("gates", "bmrs", "bmrs_uniform")
PRIORS = dict.fromkeys(["w"], Normal(1.0))


def one(mean, std):
    return Diagonal(*({"w": torch.tensor(values, dtype=torch.float64)} for values in (mean, std)))


def test_weight_scores_are_their_formulas():
    posterior = one([0.5, -2.0, 0.1], [0.2, 1.0, 3.0])
    mean, std = posterior.mean["w"], posterior.std["w"]
    at_zero = -torch.distributions.Normal(mean, std).log_prob(torch.zeros(3).double())
    expected = {
        "magnitude": mean.abs(),
        "snr": mean.abs() / std,
        "curvature": mean.square() / (2 * std.square()),
        "density": at_zero,
        "log_alpha": -(std.square() / mean.square()).log(),
        "savage_dickey": at_zero + torch.distributions.Normal(0.0, 0.7).log_prob(torch.zeros(3).double()),
    }
    for name, value in expected.items():
        scores = CRITERIA[name].weights(posterior, {"w": Normal(0.7)})["w"]
        torch.testing.assert_close(scores, value, msg=name)


def test_density_needs_the_log_of_sigma():
    """Equal signal to noise, other spreads: the narrow one has more density at zero."""
    scores = criteria.density.density(one([0.2, 2.0], [0.1, 1.0]), {})["w"]
    assert scores[0] < scores[1]


def exact_minus_log_mass(mean, std, epsilon):
    with mpmath.workdps(60):
        m, s, e = (mpmath.mpf(v) for v in (mean, std, epsilon))
        a, b = ((v - abs(m)) / (s * mpmath.sqrt(2)) for v in (-e, e))
        outside = (mpmath.erfc(b) + mpmath.erfc(-a)) / 2
        if outside < 0.5:
            return float(-mpmath.log1p(-outside))
        return float(-mpmath.log((mpmath.erfc(-b) - mpmath.erfc(-a)) / 2))


@forall(st.floats(-30, 30), st.floats(-6, 2).map(lambda x: 10**x), st.floats(-8, 1).map(lambda x: 10**x))
@settings(max_examples=40, deadline=None)
def test_mass_near_zero_has_digits_everywhere(mean, std, epsilon):
    if abs(mean) / std > 1e4:
        mean = std * 1e4
    got = float(criteria.mass.mass(one([mean], [std]), {}, epsilon=epsilon)["w"])
    assert got == pytest.approx(exact_minus_log_mass(mean, std, epsilon), rel=1e-6, abs=1e-300)


def test_mass_agrees_with_draws():
    posterior = one([0.3], [0.4])
    draws = posterior.sample(400_000, generator=torch.Generator().manual_seed(0))["w"]
    share = (draws.abs() < 0.1).double().mean()
    got = criteria.mass.mass(posterior, {}, epsilon=0.1)["w"].neg().exp()
    assert float(got) == pytest.approx(float(share), abs=5 * float((share * (1 - share) / len(draws)).sqrt()))


@pytest.mark.parametrize("name", [name for name in CRITERIA if name not in OF_GATES])  # of which there are none here
def test_cut_weights_score_lowest_and_certain_ones_highest(name):
    scores = CRITERIA[name].weights(one([0.0, 1.0, 1.0], [0.0, 0.5, 0.0]), PRIORS)["w"]
    assert not bool(scores.isnan().any())
    assert scores[0] <= scores[1] <= scores[2]


def regression(seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    X[:, 1] += 0.8 * X[:, 0]
    y = X @ torch.tensor([1.0, 0.1, 0.0, -0.5, 0.02]).double() + 0.3 * torch.randn(30, generator=generator).double()
    return X, y


def posterior_of_regression(X, y, precision):
    mean, covariance, evidence = linear_regression(X, y, 0.3, precision)
    return Dense({"w": mean}, torch.linalg.inv(covariance)), evidence


def test_savage_dickey_is_the_exact_difference_of_evidences():
    X, y = regression()
    precision = torch.tensor([1.0, 2.0, 0.5, 1.0, 4.0]).double()
    posterior, whole = posterior_of_regression(X, y, precision)
    scores = criteria.savage_dickey.savage_dickey(posterior, {"w": Normal(precision.rsqrt())})["w"]
    for i in range(5):
        others = [j for j in range(5) if j != i]
        _, without = posterior_of_regression(X[:, others], y, precision[others])
        assert float(scores[i]) == pytest.approx(float(whole - without), abs=1e-9)
    assert bool((scores > 0).any())
    assert bool((scores < 0).any())


def test_savage_dickey_of_a_unit_is_the_exact_difference_of_evidences():
    X, y = regression(1)
    precision = torch.tensor([1.0, 2.0, 0.5, 1.0, 4.0]).double()
    posterior, whole = posterior_of_regression(X, y, precision)
    groups = [[0, 1], [2], [1, 3, 4]]
    scores = criteria.savage_dickey.unit_savage_dickey(
        posterior, {"w": Normal(precision.rsqrt())}, [{"w": torch.tensor(group)} for group in groups]
    )
    for group, got in zip(groups, scores, strict=True):
        others = [j for j in range(5) if j not in group]
        _, without = posterior_of_regression(X[:, others], y, precision[others])
        assert float(got) == pytest.approx(float(whole - without), abs=1e-8)


def test_savage_dickey_refuses_an_improper_prior():
    class Improper(Prior):
        is_proper = False

    with pytest.raises(ImproperPrior, match="log_alpha"):
        criteria.savage_dickey.savage_dickey(one([1.0], [1.0]), {"w": Improper()})


UNITS = [
    {"0.weight": torch.arange(5), "0.bias": torch.tensor([0]), "2.weight": torch.arange(0, 18, 6)},  # a whole unit
    {"0.weight": torch.arange(5, 10), "0.bias": torch.tensor([1])},  # its row
    {"2.weight": torch.arange(2, 18, 6)},  # its column
    {"0.weight": torch.tensor([0, 7, 12]), "2.bias": torch.tensor([1])},  # anything
    {"0.weight": torch.arange(10), "0.bias": torch.arange(2)},  # two rows
]


@pytest.mark.parametrize("family", FAMILIES)
def test_unit_scores_come_from_the_joint_posterior(family):
    model = two_layers()
    posterior = FAMILIES[family](model)
    covariance, mean = covariance_of(posterior), flat(posterior.mean)
    priors = dict.fromkeys(posterior.mean, Normal(0.7))
    for place, group in enumerate(UNITS):
        chosen = flat_places(posterior.mean, group)
        mu, sigma = mean[chosen], covariance[chosen][:, chosen]
        cost = 0.5 * float(mu @ torch.linalg.solve(sigma, mu))
        q = torch.distributions.MultivariateNormal(mu, sigma)
        at_zero = -float(q.log_prob(torch.zeros_like(mu)))
        log_prior = len(chosen) * float(Normal(0.7).log_prob(torch.zeros(()).double()))
        expected = {
            "magnitude": float(mu.norm()),
            "snr": (2 * cost) ** 0.5,
            "curvature": cost,
            "density": at_zero,
            "savage_dickey": at_zero + log_prior,
        }
        for name, value in expected.items():
            units = CRITERIA[name].units
            assert units is not None
            got = float(units(posterior, priors, UNITS)[place])
            assert got == pytest.approx(value, rel=1e-5, abs=1e-6), (name, place)


def test_a_prior_that_differs_within_a_layer_is_in_the_joint_density():
    posterior = kronecker(two_layers(), prior={"0.weight": 0.5, "0.bias": 3.0, "2": 1.5})
    covariance = covariance_of(posterior)
    got = group_log_det(posterior, UNITS)
    for group, value in zip(UNITS, got, strict=True):
        chosen = flat_places(posterior.mean, group)
        assert float(value) == pytest.approx(float(torch.logdet(covariance[chosen][:, chosen])), abs=1e-6)


def test_mass_of_a_unit_is_that_of_a_box():
    posterior = diagonal(two_layers())
    single = criteria.mass.mass(posterior, {})
    got = criteria.mass.unit_mass(posterior, {}, UNITS[:1])
    assert float(got[0]) == pytest.approx(sum(float(single[n].flatten()[i].sum()) for n, i in UNITS[0].items()))
    with pytest.raises(TypeError, match="independent"):
        criteria.mass.unit_mass(dense(two_layers()), {}, UNITS)


def test_units_after_a_cut_by_units_are_scored_in_closed_form():
    posterior = kronecker(two_layers())
    masks = {n: torch.ones_like(m, dtype=torch.bool) for n, m in posterior.mean.items()}
    masks["0.weight"][3] = masks["0.bias"][3] = masks["2.weight"][:, 3] = False
    conditioned = posterior.condition(masks, tolerance=1e-12)
    smaller, groups = reduced(conditioned, UNITS)
    assert not isinstance(smaller, Conditioned)
    assert smaller.num_parameters == int(flat(masks).sum())
    torch.testing.assert_close(
        flat(smaller.variance).double(), flat(conditioned.variance)[flat(masks)], rtol=1e-6, atol=1e-9
    )
    slow = bl.posteriors.group_saliency(conditioned, UNITS)
    torch.testing.assert_close(bl.posteriors.group_saliency(smaller, groups), slow, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        criteria.density.unit_density(conditioned, {}, UNITS[:3]),
        group_log_det(conditioned, random_groups(conditioned, UNITS[:3])) / 2
        + slow[:3]
        + torch.tensor([sum(len(i) for i in g.values()) for g in random_groups(conditioned, UNITS[:3])])
        * 0.5
        * torch.log(torch.tensor(2 * torch.pi).double()),
        rtol=1e-4,
        atol=1e-6,
    )


def test_a_scattered_cut_is_not_reduced():
    posterior = kronecker(two_layers())
    masks = {"0.weight": torch.rand(6, 5) < 0.5}
    conditioned = posterior.condition(masks)
    assert reduced(conditioned, UNITS)[0] is conditioned


def test_what_auto_stands_for():
    model = two_layers()
    assert default_criterion(diagonal(model), False) == "snr"
    assert default_criterion(diagonal(model), True) == "curvature"
    assert default_criterion(kronecker(model), False) == default_criterion(dense(model), True) == "curvature"


def test_a_new_criterion_is_a_function_and_a_line(request):
    model = two_layers()
    bnn = given(model, diagonal(model))

    def backwards(posterior, priors):
        return {name: -mean.abs() for name, mean in posterior.mean.items()}

    criteria.register_criterion(Criterion("backwards", backwards))
    request.addfinalizer(lambda: unregister("criterion", "backwards"))
    with pytest.raises(ValueError, match='"backwards" already'):
        criteria.register_criterion(Criterion("backwards", criteria.snr.snr))
    named = bl.plan(bnn, bl.Budget(sparsity=0.3), criterion="backwards")
    passed = bl.plan(bnn, bl.Budget(sparsity=0.3), criterion=backwards)
    assert named == passed
    cut, kept = (torch.cat([bnn.posterior_.mean[n].abs()[m == k] for n, m in named.masks.items()]) for k in (0, 1))
    assert float(cut.min()) >= float(kept.max())
    narrow = bl.plan(bnn, bl.Budget(sparsity=0.3), criterion=functools.partial(criteria.mass.mass, epsilon=1e-3))
    assert narrow.criterion == "mass"
    with pytest.raises(ValueError, match='Closest: "magnitude"'):
        bl.plan(bnn, bl.Budget(sparsity=0.3), criterion="magnitud")
