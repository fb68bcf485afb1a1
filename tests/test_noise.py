"""Fast normal noise: its distribution, its independence, and that it depends on the seed alone."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scipy import stats

from bayeslim import noise
from bayeslim.noise import (
    MIN_VALUES_FOR_NUMPY,
    VALUES_PER_STREAM,
    standard_normal,
    standard_normal_like,
    standard_normals_like,
)
from processes import exit_code_of

SIZES = [1, MIN_VALUES_FOR_NUMPY - 1, MIN_VALUES_FOR_NUMPY, VALUES_PER_STREAM, 3 * VALUES_PER_STREAM + 7]
"""Torch's own generator, both sides of the switch to numpy, and several chunks with a ragged end."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def threads():
    """Set the number of threads, put back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [4000, 2_000_003])
def test_is_standard_normal(size, dtype):
    draws = standard_normal((size,), dtype=dtype, generator=seeded(0)).double().numpy()
    assert stats.kstest(draws, "norm").pvalue > 1e-3
    # moments 1 to 4 of N(0, 1), within five standard errors
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert (draws**power).mean() == pytest.approx(moment, abs=5 * (variance / size) ** 0.5)


def test_neighbours_are_independent():
    draws = standard_normal((200_003,), generator=seeded(0)).double()
    assert torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1].abs() < 5 / len(draws) ** 0.5


def test_large_draws_are_not_rounded_to_a_grid():
    """Of 2²⁰ draws from a continuous distribution in float32, nearly all values differ."""
    assert len(standard_normal((1 << 20,), generator=seeded(2)).unique()) > 0.9 * (1 << 20)


@pytest.mark.parametrize("beyond", [2.0, 2.999, 3.0, 3.2, 3.5, 4.0, 4.5])
def test_tails_have_their_probability_on_both_sides(beyond):
    """Ten million values, with tail events at every position alike."""
    generator, size, calls = seeded(1), VALUES_PER_STREAM + 5, 150
    draws = torch.stack([standard_normal((size,), generator=generator) for _ in range(calls)])
    expected = stats.norm.sf(beyond) * draws.numel()
    for side in (draws > beyond, draws < -beyond):
        assert int(side.sum()) == pytest.approx(expected, abs=5 * expected**0.5)
        where = side.sum(0)[: VALUES_PER_STREAM // 8 * 8].view(8, -1).sum(1).double()
        assert ((where - where.mean()).abs() < 5 * where.mean().sqrt() + 1).all()
    both = torch.corrcoef(torch.stack([(draws > beyond).double().flatten(), (draws < -beyond).double().flatten()]))
    assert both[0, 1].abs() < 5 / draws.numel() ** 0.5 + expected / draws.numel()


def test_far_tails_exist():
    """Of 120 million draws 2.6 are beyond ±5.6 on average, and 7 beyond ±5.42."""
    generator, found = seeded(8), []
    for _ in range(12):
        draws = standard_normal((10_000_000,), generator=generator).abs()
        found.append(draws[draws > 5.42])
    far = torch.cat(found)
    assert int((far > 5.6).sum()) > 0
    for beyond in (5.42, 5.6):
        expected = 2 * stats.norm.sf(beyond) * 120_000_000
        count = int((far > beyond).sum())
        assert stats.poisson.cdf(count, expected) > 1e-3
        assert stats.poisson.sf(count - 1, expected) > 1e-3


@pytest.mark.parametrize("size", SIZES)
def test_values_do_not_depend_on_the_number_of_threads(size, threads):
    threads(1)
    one = standard_normal((size,), generator=seeded(3))
    threads(2)
    assert torch.equal(one, standard_normal((size,), generator=seeded(3)))
    threads(3)
    assert torch.equal(one, standard_normal((size,), generator=seeded(3)))


@pytest.mark.parametrize("size", SIZES)
def test_is_repeatable_and_moves_on(size):
    torch.manual_seed(7)
    first, second = standard_normal((size,)), standard_normal((size,))
    torch.manual_seed(7)
    assert torch.equal(first, standard_normal((size,)))
    assert torch.equal(second, standard_normal((size,)))
    assert not torch.equal(first, second)
    generator = seeded(7)
    third = standard_normal((size,), generator=generator)
    assert not torch.equal(third, standard_normal((size,), generator=generator))
    assert torch.equal(third, standard_normal((size,), generator=seeded(7)))


@pytest.mark.parametrize("size", SIZES)
def test_a_generator_leaves_the_global_stream_alone(size):
    before = torch.get_rng_state()
    standard_normal((size,), generator=seeded(0))
    assert torch.equal(before, torch.get_rng_state())


def test_chunks_calls_and_seeds_are_independent():
    draws = standard_normal((4, VALUES_PER_STREAM), generator=seeded(1))
    same_seed_other_call = standard_normal((2, VALUES_PER_STREAM), generator=seeded(2))
    rows = torch.cat([draws, same_seed_other_call]).double()
    correlations = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlations.abs().max() < 5 / VALUES_PER_STREAM**0.5
    # neighbours across the border of two chunks, over many calls
    generator = seeded(3)
    draws = (standard_normal((VALUES_PER_STREAM + 1,), generator=generator) for _ in range(2000))
    border = torch.stack([values[VALUES_PER_STREAM - 1 : VALUES_PER_STREAM + 1] for values in draws])
    assert torch.corrcoef(border.T.double())[0, 1].abs() < 5 / 2000**0.5


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5, 4), (70, 60, 50)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_shape_and_dtype(shape, dtype):
    draws = standard_normal(shape, dtype=dtype)
    assert draws.shape == shape
    assert draws.dtype == dtype
    assert draws.is_contiguous()
    assert standard_normal_like(draws).shape == shape
    assert standard_normal_like(draws).dtype == dtype


def test_like_keeps_the_device():
    assert standard_normal_like(torch.empty(100, 100, device="meta")).device.type == "meta"


def test_another_default_device_is_of_no_account():
    expected = standard_normal((VALUES_PER_STREAM,), generator=seeded(0))
    with torch.device("meta"):
        assert torch.equal(standard_normal((VALUES_PER_STREAM,), generator=seeded(0)), expected)
        assert standard_normal((MIN_VALUES_FOR_NUMPY - 1,)).device.type == "cpu"


def test_like_does_not_track_gradients():
    assert not standard_normal_like(torch.ones(100, 100, requires_grad=True)).requires_grad


def draw_and_draw_in_a_fork() -> None:
    torch.set_num_threads(2)
    first = standard_normal((1 << 18,), generator=seeded(0))
    if os.fork() == 0:
        signal.alarm(30)
        again = standard_normal((1 << 18,), generator=seeded(0))
        os._exit(0 if (first.numpy() == again.numpy()).all() else 1)
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))


def test_works_in_a_forked_process():
    """The threads of a parent do not exist in its child, which must not wait for them."""
    assert exit_code_of(draw_and_draw_in_a_fork) == 0


def test_small_draws_are_torchs_own():
    torch.manual_seed(0)
    small = standard_normal((MIN_VALUES_FOR_NUMPY - 1,))
    torch.manual_seed(0)
    assert torch.equal(small, torch.randn(MIN_VALUES_FOR_NUMPY - 1))
    assert MIN_VALUES_FOR_NUMPY <= VALUES_PER_STREAM


def test_several_at_once_are_the_values_of_one_after_the_other(threads):
    like = {
        "large": torch.empty(3 * VALUES_PER_STREAM + 7),
        "small": torch.empty(5),
        "other": torch.empty(2, MIN_VALUES_FOR_NUMPY).double(),
    }
    one_by_one = seeded(4)
    wanted = {name: standard_normal_like(like[name], generator=one_by_one) for name in like}
    for count in (1, 2, 3):
        threads(count)
        got = standard_normals_like(like, like, generator=seeded(4))
        assert list(got) == list(like)
        assert all(torch.equal(got[name], wanted[name]) for name in like)
    assert list(standard_normals_like(like, ["small"])) == ["small"]
    assert standard_normals_like(like, []) == {}


def test_a_helper_that_wakes_up_late_is_not_waited_for(threads, monkeypatch):
    threads(2)
    expected = standard_normal((3 * VALUES_PER_STREAM,), generator=seeded(5))
    started = threading.Event()
    pool = ThreadPoolExecutor(1)
    pool.submit(started.wait)  # its only thread is busy
    monkeypatch.setattr(noise, "_pool", pool)
    try:
        assert torch.equal(expected, standard_normal((3 * VALUES_PER_STREAM,), generator=seeded(5)))
    finally:
        started.set()
        pool.shutdown()


def test_eight_threads_at_once_draw_what_each_draws_alone(threads):
    threads(3)
    sizes = [VALUES_PER_STREAM * (1 + k % 3) + k for k in range(8)]
    alone = [standard_normal((size,), generator=seeded(k)) for k, size in enumerate(sizes)]

    def draw(k: int) -> bool:
        return all(torch.equal(alone[k], standard_normal((sizes[k],), generator=seeded(k))) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(draw, range(8)))
