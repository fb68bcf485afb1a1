import pytest
import torch
from dense_gaussians import assert_moments, flat, stack, unflat
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslim.errors import NotPositiveDefinite, ShapeMismatch
from bayeslim.posteriors import Dense, LowRank


def close(a, b, tolerance=1e-8):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@settings(max_examples=30, deadline=None)
@given(rank=st.integers(0, 9), prior=st.floats(1e-2, 1e2), keep=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_equal_to_the_dense_posterior(rank, prior, keep, seed):
    generator = torch.Generator().manual_seed(seed)
    mean = {"a": torch.randn(2, 3, generator=generator).double(), "b": torch.randn(2, generator=generator).double()}
    factor = torch.randn(8, rank, generator=generator, dtype=torch.float64)
    values = torch.rand(rank, generator=generator, dtype=torch.float64) * 5
    low = LowRank(mean, factor, values, prior)
    dense = Dense(mean, factor @ torch.diag(values) @ factor.T, prior)
    masks = {name: torch.rand(t.shape, generator=generator) < keep for name, t in mean.items()}
    point = unflat(torch.randn(8, generator=generator, dtype=torch.float64), mean)
    for one, two in ((low, dense), (low.condition(masks), dense.condition(masks))):
        close(flat(one.mean), flat(two.mean))
        close(flat(one.variance), flat(two.variance))
        close(one.log_det_precision(), two.log_det_precision())
        close(flat(one.precision_product(point)), flat(two.precision_product(point)))
        close(flat(one.covariance_product(point)), flat(two.covariance_product(point)))
        close(one.quadratic(point), two.quadratic(point))
    close(low.log_prob(point), dense.log_prob(point))


def some(prior=0.4):
    generator = torch.Generator().manual_seed(0)
    mean = {"a": torch.randn(2, 3, generator=generator).double(), "b": torch.randn(2, generator=generator).double()}
    return LowRank(mean, torch.randn(8, 3, generator=generator).double(), torch.tensor([5.0, 1.0, -1e-9]), prior)


def test_samples_have_the_right_moments():
    posterior = some({"a": torch.full((2, 3), 0.3), "b": torch.tensor([0.5, 3.0])})
    root = posterior.root
    covariance = torch.linalg.inv(root @ root.T + torch.diag(posterior.prior))
    samples = posterior.sample(20_000, generator=torch.Generator().manual_seed(1))
    assert_moments(stack(samples), flat(posterior.mean), covariance)
    assert posterior.sample()["b"].shape == (2,)


def test_log_determinant_is_differentiable_in_the_prior_precision():
    posterior = some()
    delta = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    posterior.with_prior_precision(delta).log_det_precision().backward()
    close(delta.grad, flat(posterior.variance).sum())


def test_restored_is_the_same():
    posterior = some({"a": 1.0, "b": 2.0})
    again = LowRank.restore(posterior.config(), posterior.tensors())
    assert torch.equal(flat(again.variance), flat(posterior.variance))
    assert again.log_prob(posterior.mean) == posterior.log_prob(posterior.mean)


def test_what_does_not_fit_is_refused():
    posterior = some()
    with pytest.raises(ShapeMismatch, match=r"\(8, k\)"):
        LowRank(posterior.mean, posterior.factor[:5], posterior.eigenvalues)
    with pytest.raises(ShapeMismatch, match=r"\(8, k\)"):
        LowRank(posterior.mean, posterior.factor, posterior.eigenvalues[:1])
    with pytest.raises(NotPositiveDefinite, match="negative"):
        LowRank(posterior.mean, posterior.factor, -posterior.eigenvalues)
    with pytest.raises(NotPositiveDefinite, match="above zero"):
        posterior.with_prior_precision(0.0)
