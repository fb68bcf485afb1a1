"""The least loss for a rate: against every combination."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslim.quantise.allocate import TooSmall, allocate, descend_hulls, solve_exactly

numbers = st.floats(0.0, 100.0, allow_nan=False)
groups = st.lists(st.lists(st.tuples(st.integers(1, 40), numbers), min_size=1, max_size=4), min_size=1, max_size=4)


def totals(options, chosen):
    points = [points[place] for points, place in zip(options, chosen, strict=True)]
    return sum(rate for rate, _ in points), sum(loss for _, loss in points)


def brute_force(options, budget):
    every = (totals(options, chosen) for chosen in itertools.product(*(range(len(points)) for points in options)))
    return min((loss for rate, loss in every if rate <= budget), default=None)


@settings(max_examples=40, deadline=None)
@given(groups, st.integers(1, 160))
def test_the_loss_is_the_least_of_all_combinations(options, budget):
    best = brute_force(options, budget)
    if best is None:
        with pytest.raises(TooSmall) as raised:
            allocate(options, budget)
        assert raised.value.args[0] == sum(min(rate for rate, _ in points) for points in options)
        return
    rate, loss = totals(options, allocate(options, budget))
    assert rate <= budget
    assert loss == pytest.approx(best)


@settings(max_examples=40, deadline=None)
@given(groups, st.integers(1, 160))
def test_hulls_fit_and_are_within_one_step_of_the_optimum(options, budget):
    best = brute_force(options, budget)
    if best is None:
        return
    rate, loss = totals(options, descend_hulls(options, budget))
    assert rate <= budget
    largest_step = max(max(p[1] for p in points) - min(p[1] for p in points) for points in options)
    assert best - 1e-9 <= loss <= best + largest_step + 1e-9


def test_hulls_are_optimal_at_the_rates_they_pass_through():
    options = [
        [(b * n, n * scale * 4.0**-b) for b in range(1, 9)] for n, scale in ((7, 3.0), (2, 50.0), (5, 0.1), (9, 1.0))
    ]
    for budget in range(23, 180, 7):
        rate, loss = totals(options, descend_hulls(options, budget))
        assert loss <= brute_force(options, rate) + 1e-12 or budget - rate < 9


def test_sharper_groups_get_more_bits():
    options = [[(10 * b, 10 * certainty * 4.0**-b) for b in range(1, 9)] for certainty in (1.0, 16.0, 256.0)]
    assert solve_exactly(options, 10 * 12) == [1, 3, 5]  # two bits, four, six: each divides the loss by sixteen


def test_many_groups_take_the_hulls():
    options = [[(b, (1 + g % 7) * 4.0**-b) for b in range(1, 9)] for g in range(300)]
    rate, loss = totals(options, allocate(options, 900))
    assert rate == 900
    assert loss < totals(options, [2] * 300)[1]
