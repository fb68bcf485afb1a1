"""The diagonal Gaussian: moments, densities, point masses, conditioning."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions

from bayeslim.errors import ShapeMismatch
from bayeslim.io.registry import registered
from bayeslim.posteriors import Diagonal


def make(dtype=torch.float64, std_dtype=None) -> Diagonal:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (2, 3), "b": (4,), "scalar": ()}
    mean = {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in shapes.items()}
    std = {
        n: (0.1 + torch.rand(s, generator=generator, dtype=torch.float64)).to(std_dtype or dtype)
        for n, s in shapes.items()
    }
    return Diagonal(mean, std)


def test_moments_and_names():
    q = make()
    assert q.names == ("a.weight", "b", "scalar")
    assert q.num_parameters == 11
    for name in q.names:
        assert torch.allclose(q.variance[name], q.std[name] ** 2)
        assert torch.equal(q.mode[name], q.mean[name])
    assert repr(q) == "Diagonal posterior over 11 weights in 3 parameters"


def test_samples_have_its_moments():
    q, n = make(), 100_000
    draws = q.sample(n, generator=torch.Generator().manual_seed(1))
    for name in q.names:
        assert draws[name].shape == (n, *q.mean[name].shape)
        assert ((draws[name].mean(0) - q.mean[name]).abs() < 5 * q.std[name] / n**0.5).all()
        assert torch.allclose(draws[name].var(0), q.variance[name], rtol=5 * (2 / n) ** 0.5)
    together = torch.cat([draws[name].view(n, -1) for name in q.names], 1)
    correlation = torch.corrcoef(together.T) - torch.eye(11, dtype=torch.float64)
    assert correlation.abs().max() < 5 / n**0.5


def test_one_sample_has_no_extra_dimension():
    q = make()
    assert {n: t.shape for n, t in q.sample().items()} == {n: t.shape for n, t in q.mean.items()}


def test_sampling_repeats_by_generator_alone():
    q = make()
    before = torch.get_rng_state()
    first = q.sample(generator=torch.Generator().manual_seed(5))
    second = q.sample(generator=torch.Generator().manual_seed(5))
    assert all(torch.equal(first[n], second[n]) for n in q.names)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(q.sample()["b"], q.sample()["b"])


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.floats(0.1, 10))
def test_log_prob_against_distributions(seed, scale):
    q, generator = make(), torch.Generator().manual_seed(seed)
    at = {n: scale * torch.randn(m.shape, generator=generator, dtype=m.dtype) for n, m in q.mean.items()}
    expected = sum(distributions.Normal(q.mean[n], q.std[n]).log_prob(at[n]).sum() for n in q.names)
    assert q.log_prob(at).item() == pytest.approx(expected.item())
    assert q.log_prob(at) <= q.log_prob(q.mean)


def test_point_masses():
    q = Diagonal({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, 0.0])})
    assert q.sample(100)["w"][:, 1].eq(2.0).all()
    density = -math.log(0.5) - 0.5 * math.log(2 * math.pi)
    assert q.log_prob({"w": torch.tensor([1.0, 2.0])}).item() == pytest.approx(density)
    assert q.log_prob({"w": torch.tensor([1.0, 2.1])}).item() == -math.inf


def test_a_shared_std_broadcasts():
    q = Diagonal({"w": torch.zeros(3, 2)}, {"w": torch.tensor(0.5)})
    assert q.std["w"].shape == (3, 2)
    assert q.sample(7)["w"].shape == (7, 3, 2)


def test_conditioning_zeroes_and_leaves_the_rest():
    q = make()
    masks = {"b": torch.tensor([True, False, True, False])}
    conditioned = q.condition(masks)
    assert torch.equal(conditioned.mean["b"], q.mean["b"] * masks["b"])
    assert torch.equal(conditioned.variance["b"], q.variance["b"] * masks["b"])
    assert torch.equal(conditioned.mean["a.weight"], q.mean["a.weight"])
    assert conditioned.sample(50)["b"][:, ~masks["b"]].abs().max() == 0
    assert q.mean["b"].abs().min() > 0
    # conditioning is p(w_R | w_S = 0): the joint density at w_S = 0 up to the constant q(w_S = 0)
    at = conditioned.sample()
    cut = distributions.Normal(q.mean["b"], q.std["b"]).log_prob(torch.zeros(4).double())[~masks["b"]].sum()
    assert conditioned.log_prob(at).item() == pytest.approx((q.log_prob(at) - cut).item())


def test_conditioning_refuses_foreign_masks():
    with pytest.raises(ShapeMismatch, match=r'Closest names: "a\.weight"'):
        make().condition({"a.weigth": torch.ones(2, 3)})
    with pytest.raises(ShapeMismatch, match=r"shape \(2, 3\)"):
        make().condition({"a.weight": torch.ones(3, 2)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_means_with_single_precision_stds(dtype):
    q = make(dtype, torch.float32)
    assert all(t.dtype == dtype for t in q.sample().values())
    assert all(t.dtype == dtype for t in q.sample(3).values())
    assert math.isfinite(q.log_prob(q.sample()).item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_stds_of_half_precision_means_keep_their_density(dtype):
    """A standard deviation that half precision rounds to zero is not a point mass."""
    q = Diagonal({"w": torch.ones(3, dtype=dtype)}, {"w": torch.full((3,), 1e-9)})
    expected = 3 * (-math.log(1e-9) - 0.5 * math.log(2 * math.pi))
    assert q.log_prob(q.mean).item() == pytest.approx(expected, rel=1e-5)


def test_restore_builds_it_again():
    q = make()
    again = registered("posterior", q.kind).restore(q.config(), q.tensors())
    for name in q.names:
        assert torch.equal(again.mean[name], q.mean[name])
        assert torch.equal(again.std[name], q.std[name])
