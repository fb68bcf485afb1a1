"""The low-rank plus diagonal covariance against its dense matrix."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import MultivariateNormal

from bayeslim.errors import NotPositiveDefinite, ShapeMismatch
from bayeslim.io.registry import registered
from bayeslim.posteriors import LowRankCovariance, group_saliency
from bayeslim.posteriors.conjugate import DEFAULT_SOLVER
from bayeslim.prune import criteria

SHAPES = {"a": (2, 3), "b": (4,)}
D = 10


def posterior(rank: int = 3, seed: int = 0, small: float = 1.0) -> LowRankCovariance:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return LowRankCovariance(
        {n: draw(*s) for n, s in SHAPES.items()},
        {n: small * (draw(*s).abs() + 0.1) for n, s in SHAPES.items()},
        {n: draw(rank, *s) for n, s in SHAPES.items()},
    )


def flat(params) -> torch.Tensor:
    return torch.cat(
        [params[n].reshape(*params[n].shape[: params[n].ndim - len(s)], -1) for n, s in SHAPES.items()], -1
    )


def params(vector: torch.Tensor) -> dict[str, torch.Tensor]:
    a, b = vector.split([6, 4], -1)
    return {"a": a.reshape(*vector.shape[:-1], 2, 3), "b": b}


def dense(q: LowRankCovariance) -> torch.Tensor:
    U = flat(q.factor)
    return torch.diag(flat(q.own_std).square()) + U.T @ U


@pytest.mark.parametrize("small", [1.0, 1e-2])
def test_is_its_dense_matrix(small):
    q = posterior(small=small)
    covariance, v = dense(q), torch.randn(5, D, dtype=torch.float64)
    torch.testing.assert_close(flat(q.variance), covariance.diagonal())
    torch.testing.assert_close(flat(q.covariance_product(params(v))), v @ covariance)
    torch.testing.assert_close(flat(q.precision_product(params(v))), v @ covariance.inverse(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(q.log_det_precision(), -torch.logdet(covariance))
    exact = MultivariateNormal(flat(q.mean), covariance)
    w = q.sample()
    torch.testing.assert_close(q.log_prob(w), exact.log_prob(flat(w)), rtol=1e-6, atol=1e-5)


def test_draws_have_its_moments():
    q = posterior()
    draws = flat(q.sample(40_000, generator=torch.Generator().manual_seed(1)))
    scale = dense(q).diagonal().sqrt()
    assert ((draws.mean(0) - flat(q.mean)) / scale).abs().max() < 0.03
    assert ((draws.T.cov() - dense(q)) / (scale[:, None] * scale)).abs().max() < 0.05


KEPT = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0, 1]).bool()


def conditional(q: LowRankCovariance, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """μ_R − Σ_RS Σ_SS⁻¹ μ_S and Σ_RR − Σ_RS Σ_SS⁻¹ Σ_SR."""
    covariance, mean = dense(q), flat(q.mean)
    gain = covariance[kept][:, ~kept] @ covariance[~kept][:, ~kept].inverse()
    return mean[kept] - gain @ mean[~kept], covariance[kept][:, kept] - gain @ covariance[~kept][:, kept]


def test_conditioning_is_exact_and_of_the_same_kind():
    q = posterior()
    given = q.condition(params(KEPT))
    mean, covariance = conditional(q, KEPT)
    torch.testing.assert_close(flat(given.mean)[KEPT], mean)
    torch.testing.assert_close(dense(given)[KEPT][:, KEPT], covariance)
    assert not flat(given.mean)[~KEPT].any()
    assert not flat(given.variance)[~KEPT].any()
    assert torch.equal(flat(given.support), KEPT)
    restriction = q.restrict(params(KEPT), DEFAULT_SOLVER)
    v = torch.randn(D, dtype=torch.float64) * KEPT
    torch.testing.assert_close(flat(restriction.solve(params(v)))[KEPT], covariance @ v[KEPT])
    torch.testing.assert_close(restriction.log_det(), -torch.logdet(covariance))
    torch.testing.assert_close(flat(restriction.variance())[KEPT], covariance.diagonal())
    w = given.sample()
    torch.testing.assert_close(given.log_prob(w), MultivariateNormal(mean, covariance).log_prob(flat(w)[KEPT]))
    assert given.log_prob(q.mean) == -torch.inf
    product = flat(given.precision_product(given.covariance_product(params(v))))
    torch.testing.assert_close(product, v)


def test_conditioning_twice_is_conditioning_once():
    q, first = posterior(), torch.ones(D).bool()
    first[1] = False
    once, twice = q.condition(params(KEPT)), q.condition(params(first)).condition(params(KEPT))
    for name, value in once.mean.items():
        torch.testing.assert_close(twice.mean[name], value)
    torch.testing.assert_close(dense(twice), dense(once))
    again = once.condition(params(KEPT))
    assert all(torch.equal(again.factor[n], once.factor[n]) for n in SHAPES)


def test_costs_of_units_are_those_of_the_dense_matrix():
    q = posterior()
    groups = [{"a": torch.tensor([0, 4]), "b": torch.tensor([2])}, {"b": torch.tensor([0])}]
    places = [torch.tensor([0, 4, 8]), torch.tensor([6])]
    for group, place in zip(groups, places, strict=True):
        mean, covariance = flat(q.mean)[place], dense(q)[place][:, place]
        cost = 0.5 * mean @ covariance.inverse() @ mean
        torch.testing.assert_close(group_saliency(q, [group])[0], cost)
        density = -MultivariateNormal(mean, covariance).log_prob(torch.zeros(len(place)).double())
        torch.testing.assert_close(criteria.density.unit_density(q, {}, [group])[0], density)


def test_functional_covariance_is_that_of_the_jacobian():
    q, J = posterior(), torch.randn(4, 2, D, dtype=torch.float64)
    torch.testing.assert_close(q.functional_covariance(params(J)), J @ dense(q) @ J.mT)


def test_comes_back_from_its_tensors():
    q = posterior().condition(params(KEPT))
    again = registered("posterior", q.kind).restore(q.config(), q.tensors())
    draws = [one.sample(3, generator=torch.Generator().manual_seed(0)) for one in (q, again)]
    assert all(torch.equal(draws[0][n], draws[1][n]) for n in SHAPES)


def test_refuses_what_it_cannot_be():
    q = posterior()
    with pytest.raises(ValueError, match="Kronecker"):
        q.condition(params(KEPT), how="row")
    with pytest.raises(TypeError, match="another prior"):
        q.with_prior_precision(1.0)
    with pytest.raises(ShapeMismatch, match="directions"):
        LowRankCovariance(q.mean, q.own_std, {"a": torch.zeros(2, 2, 3), "b": torch.zeros(3, 4)})
    with pytest.raises(NotPositiveDefinite, match="σ = 0"):
        LowRankCovariance(q.mean, {n: torch.zeros_like(s) for n, s in q.own_std.items()}, q.factor)
