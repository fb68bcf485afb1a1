import pytest
import torch
from dense_gaussians import assert_moments, dense_conditional, eye, flat, psd, stack, unflat

from bayeslim.errors import BayeslimWarning, NotPositiveDefinite, ShapeMismatch
from bayeslim.posteriors import Dense


def close(a, b, tolerance=1e-8):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def small(**kwargs):
    generator = torch.Generator().manual_seed(0)
    mean = {"a": torch.randn(2, 3, generator=generator).double(), "b": torch.randn(2, generator=generator).double()}
    return mean, psd(8, generator=generator) + 0.1 * eye(8)


def test_everything_against_the_matrix():
    mean, precision = small()
    posterior = Dense(mean, precision, {"a": 0.5, "b": torch.tensor([1.0, 2.0], dtype=torch.float64)})
    total = precision + torch.diag(torch.tensor([0.5] * 6 + [1.0, 2.0], dtype=torch.float64))
    oracle = torch.distributions.MultivariateNormal(flat(mean), precision_matrix=total)
    point = torch.randn(8, dtype=torch.float64)
    close(flat(posterior.variance), oracle.variance)
    close(posterior.log_prob(unflat(point, mean)), oracle.log_prob(point))
    close(flat(posterior.precision_product(unflat(point, mean))), total @ point)
    close(flat(posterior.covariance_product(unflat(point, mean))), oracle.covariance_matrix @ point)
    samples = posterior.sample(20_000, generator=torch.Generator().manual_seed(1))
    assert_moments(stack(samples), flat(mean), oracle.covariance_matrix)
    assert posterior.sample()["a"].shape == (2, 3)
    assert posterior.sample(0)["a"].shape == (0, 2, 3)
    assert posterior.jitter == 0


def test_log_determinant_is_differentiable_in_the_prior_precision():
    mean, precision = small()
    delta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    Dense(mean, precision).with_prior_precision(delta).log_det_precision().backward()
    close(delta.grad, torch.linalg.inv(precision + 0.3 * eye(8)).trace())


def test_a_subnetwork_leaves_the_rest_at_the_mean():
    mean, precision = small()
    indices = {"a": torch.tensor([4, 1]), "b": torch.tensor([0])}
    precision = precision[:3, :3]
    posterior = Dense(mean, precision, indices=indices)
    covariance = torch.linalg.inv(precision)
    close(posterior.variance["a"].flatten()[[4, 1]], covariance.diagonal()[:2])
    assert int(torch.count_nonzero(flat(posterior.variance))) == 3
    samples = posterior.sample(5_000, generator=torch.Generator().manual_seed(1))
    chosen = stack(samples)[:, [4, 1, 6]]
    assert_moments(chosen, flat(mean)[[4, 1, 6]], covariance)
    assert torch.equal(samples["a"][:, 0, 0], mean["a"][0, 0].expand(5_000))
    oracle = torch.distributions.MultivariateNormal(flat(mean)[[4, 1, 6]], precision_matrix=precision)
    close(posterior.log_prob({name: t[0] for name, t in samples.items()}), oracle.log_prob(chosen[0]))
    assert posterior.log_prob({"a": mean["a"] + 1, "b": mean["b"]}) == -torch.inf


def test_a_subnetwork_conditioned():
    mean, precision = small()
    indices = {"a": torch.tensor([4, 1]), "b": torch.tensor([0])}
    masks = {"a": torch.tensor([[True, False, True], [False, True, True]])}
    posterior = Dense(mean, precision[:3, :3], indices=indices).condition(masks)
    wanted, covariance = dense_conditional(flat(mean)[[4, 1, 6]], precision[:3, :3], torch.tensor([True, False, True]))
    close(posterior.mean["a"][1, 1], wanted[0])
    close(posterior.mean["b"][0], wanted[2])
    close(posterior.variance["b"][0], covariance[2, 2])
    # point masses stay where they are unless they are cut
    assert posterior.mean["a"][0, 0] == mean["a"][0, 0]
    assert posterior.mean["a"][1, 0] == 0
    assert int(flat(posterior.support).sum()) == 2


def test_restored_is_the_same():
    mean, precision = small()
    posterior = Dense(mean, precision[:3, :3], 0.3, indices={"a": torch.tensor([4, 1]), "b": torch.tensor([0])})
    again = Dense.restore(posterior.config(), posterior.tensors())
    assert torch.equal(flat(again.variance), flat(posterior.variance))
    assert torch.equal(again.places, posterior.places)
    assert again.log_prob(mean) == posterior.log_prob(mean)


def test_jitter_only_where_needed_and_reported():
    singular = torch.ones(2, 2, dtype=torch.float64)
    with pytest.warns(BayeslimWarning, match="singular to rounding"):
        posterior = Dense({"w": torch.zeros(2)}, singular)
    assert 0 < posterior.jitter < 1e-6
    assert Dense({"w": torch.zeros(2)}, singular, 0.1).jitter == 0
    # float32 alone would fail here, float64 does not
    sharp = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 1e-7]])
    assert Dense({"w": torch.zeros(2)}, sharp).jitter == 0
    with pytest.raises(NotPositiveDefinite, match="larger prior"):
        Dense({"w": torch.zeros(2)}, -singular)


def test_what_does_not_fit_is_refused():
    mean, precision = small()
    with pytest.raises(ShapeMismatch, match=r"\(8, 8\)"):
        Dense(mean, precision[:5, :5])
    with pytest.raises(ShapeMismatch, match='"c"'):
        Dense(mean, precision, indices={"c": torch.tensor([0])})
    for bad in (torch.tensor([0, 6]), torch.tensor([-1]), torch.tensor([0.0]), torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(ShapeMismatch, match="from 0 to 5"):
            Dense(mean, precision, indices={"a": bad})
    with pytest.raises(ShapeMismatch, match="distinct"):
        Dense(mean, precision, indices={"a": torch.tensor([1, 1])})
