"""KL schedules: their shape, their average over an epoch, and how training moves through them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bayeslim as bl
from bayeslim.train.schedules import Blundell, Cyclic, Position, Schedule, Uniform, Warmup


@given(step=st.integers(0, 10**9), length=st.one_of(st.none(), st.integers(1, 10**6)))
def test_uniform_is_one(step, length):
    assert Uniform().weight(Position(step, length)) == 1.0


@given(length=st.integers(1, 10**6), at=st.floats(0, 1, exclude_max=True), epoch=st.integers(0, 5))
def test_blundell_is_finite_and_not_negative_for_any_epoch_length(length, at, epoch):
    weight = Blundell().weight(Position(epoch * length + int(at * length), length))
    assert math.isfinite(weight)
    assert 0 <= weight <= length


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 3000), epoch=st.integers(0, 3))
def test_blundell_sums_to_one_kl_an_epoch(length, epoch):
    weights = [Blundell().weight(Position(epoch * length + i, length)) / length for i in range(length)]
    assert math.fsum(weights) == pytest.approx(1, abs=1e-12)


def test_blundell_sums_to_one_in_an_epoch_of_a_million():
    m = 10**6
    head = math.fsum(Blundell().weight(Position(i, m)) / m for i in range(2000))
    assert head == pytest.approx(1, abs=1e-12)
    assert Blundell().weight(Position(m - 1, m)) == 0


@given(length=st.integers(1, 60))
def test_blundell_is_the_papers_formula(length):
    for i in range(1, length + 1):
        exact = Fraction(2 ** (length - i), 2**length - 1)
        assert Blundell().weight(Position(i - 1, length)) == pytest.approx(length * float(exact), rel=1e-12)


@given(start=st.floats(0, 20), rise=st.floats(0.1, 20), length=st.integers(1, 1000), step=st.integers(0, 60_000))
def test_warmup_is_linear_between_its_ends(start, rise, length, step):
    weight = Warmup(end=start + rise, start=start).weight(Position(step, length))
    epoch = step / length
    if epoch <= start:
        assert weight == 0
    elif epoch >= start + rise:
        assert weight == pytest.approx(1)
    else:
        assert weight == pytest.approx((epoch - start) / rise, abs=1e-9)


def test_warmup_without_a_ramp_is_a_step():
    assert [Warmup(end=2, start=2).weight(Position(s, 1)) for s in range(4)] == [0, 0, 1, 1]


def test_cyclic_rises_again_every_period():
    weights = [Cyclic(period=4, ramp=0.5).weight(Position(step, 2)) for step in range(16)]
    assert weights == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1] * 2
    assert Cyclic(period=4, ramp=0).weight(Position(0, 2)) == 1


@settings(deadline=None)
@given(period=st.integers(1, 8), ramp=st.floats(0.05, 1), length=st.integers(1, 50))
def test_cyclic_stays_between_zero_and_one(period, ramp, length):
    weights = [Cyclic(period, ramp).weight(Position(s, length)) for s in range(2 * period * length)]
    assert weights[0] == 0
    assert all(0 <= w <= 1 for w in weights)
    assert weights[: period * length] == pytest.approx(weights[period * length :], abs=1e-9)


@pytest.mark.parametrize("schedule", [Blundell(), Warmup(3), Cyclic(3)], ids=lambda s: type(s).__name__)
def test_counting_in_epochs_needs_their_length(schedule):
    with pytest.raises(bl.errors.BayeslimError, match="steps_per_epoch"):
        schedule.weight(Position(0, None))


@pytest.mark.parametrize("bad", ["linear", 1.0, Warmup])
def test_a_schedule_must_be_one(bad):
    with pytest.raises(TypeError, match="kl_schedule"):
        bl.Variational(kl_schedule=bad)


def regression(**options) -> bl.Bayesian:
    likelihood = bl.likelihoods.Gaussian(1.0)
    return bl.bayesianize(nn.Linear(3, 1), bl.Variational(**options), likelihood=likelihood, num_data=6)


def test_a_foreign_loop_follows_the_schedule():
    bnn = regression(kl_schedule=Warmup(end=2))
    optimizer = bnn.optimizer(lr=1e-3, steps_per_epoch=2)
    weights = []
    for _ in range(6):
        bnn.loss((torch.randn(3, 3), torch.randn(3, 1))).backward()
        weights.append(bnn.terms.kl_weight)
        optimizer.step()
    assert weights == [0, 0.25, 0.5, 0.75, 1, 1]


def test_fit_counts_steps_not_batches():
    bnn = regression(kl_schedule=Blundell())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(6, 3), torch.randn(6, 1)), 1)
    bnn.fit(loader, epochs=2, accumulate=2, progress=False)
    assert (bnn.step, bnn.steps_per_epoch) == (6, 3)


def test_temperature_and_an_explicit_weight():
    bnn = regression(temperature=0.5)
    batch = (torch.randn(3, 3), torch.randn(3, 1))
    bnn.loss(batch)
    assert bnn.terms.kl_weight == 0.5
    loss = bnn.loss(batch, kl_weight=0.2)
    assert bnn.terms.kl_weight == pytest.approx(0.1)
    assert loss.item() == pytest.approx(float(bnn.terms.nll + bnn.terms.kl * 0.1 / 6), rel=1e-6)


def test_an_outsiders_schedule_works():
    class Half(Schedule):
        def weight(self, position: Position) -> float:
            return 0.5

    bnn = regression(kl_schedule=Half())
    bnn.loss((torch.randn(3, 3), torch.randn(3, 1)))
    assert bnn.terms.kl_weight == 0.5
