"""The models: logarithms in integers, adaptive numbers, steps, codes and layouts."""

from __future__ import annotations

import decimal
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meter import Meter

from bayeslim.coding.adaptive import Bits, Naturals, Symbols
from bayeslim.coding.coders import Reader, Writer
from bayeslim.coding.codes import code_codes
from bayeslim.coding.formats import FORMATS
from bayeslim.coding.geometry import Grid, Layout, layouts
from bayeslim.coding.logarithms import LOGARITHMS, ONE, POWER_BITS, POWERS, log2, power
from bayeslim.coding.steps import Step, Steps, common_step, unzigzag, zigzag


def test_logarithms_and_powers_are_close_and_monotone():
    numbers = [*range(1, 3000), *(int(1.37**n) for n in range(30, 180))]
    found = [log2(n) for n in numbers]
    assert found == sorted(found)
    assert max(abs(a / ONE - math.log2(n)) for a, n in zip(found, numbers, strict=True)) < 1e-6
    exponents = range(0, 40 * ONE, ONE // 97)
    powers = [power(e) for e in exponents]
    assert powers == sorted(powers, reverse=True)
    assert max(abs(p - 2.0 ** (28 - e / ONE)) for p, e in zip(powers, exponents, strict=True)) < 64
    assert power(29 * ONE) == 0


def test_the_tables_are_right_to_the_last_digits():
    assert max(abs(log2(1024 + i) - ONE * math.log2(1024 + i)) for i in range(1024)) < 2
    assert max(abs(power(i * ONE // 1024) - 2.0 ** (28 - i / 1024)) for i in range(4096)) < 2


def test_the_tables_are_the_same_with_any_floating_point_library():
    """No exact value is close enough to a rounding boundary for an error of a few ulps to change the table."""
    with decimal.localcontext(prec=40):
        two = decimal.Decimal(2)
        for i in range(1025):
            logarithm = ONE * (1 + decimal.Decimal(i) / 1024).ln() / two.ln()
            power_of_two = two ** (POWER_BITS - decimal.Decimal(i) / 1024)
            for exact, rounded in ((logarithm, LOGARITHMS[i]), (power_of_two, POWERS[i])):
                ulp = max(exact, 1) * decimal.Decimal(2) ** -52
                assert abs(exact - rounded) < decimal.Decimal("0.5") - 16 * ulp


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(0, 3))
def test_naturals_and_symbols_are_read_as_written(numbers, contexts):
    def send(coder, values):
        naturals, symbols, bits = Naturals(5000), Symbols(5001), Bits()
        found = []
        for place, value in enumerate(values):
            where = [(place % (n + 2), n) for n in range(contexts)]
            found.append((naturals.code(coder, value, *where), symbols.code(coder, value, *where)))
            bits.code(coder, value & 1, *where)
        return found

    writer = Writer()
    send(writer, numbers)
    assert send(Reader(writer.finish()), [0] * len(numbers)) == [(n, n) for n in numbers]


def test_adaptive_symbols_cost_little_more_than_their_entropy():
    generator = np.random.default_rng(0)
    probabilities = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    values = generator.choice(5, 4000, p=probabilities)
    meter, symbols = Meter(), Symbols(5)
    for value in values.tolist():
        symbols.code(meter, value)
    counts = np.bincount(values)
    entropy = -(counts * np.log2(counts / counts.sum())).sum()
    assert entropy < meter.bits < entropy + 4 * (0.5 * math.log2(4000) + 1)


def test_a_useful_context_saves_bits_and_a_useless_one_costs_few():
    generator = np.random.default_rng(0)
    values = generator.integers(0, 2, 2000).tolist()
    costs = []
    for contexts in ([0] * 2000, values, generator.integers(0, 4, 2000).tolist()):
        meter, bits = Meter(), Bits()
        for value, context in zip(values, contexts, strict=True):
            bits.code(meter, value, None, context)
        costs.append(meter.bits)
    assert costs[1] < 40 < 1990 < costs[0]
    assert costs[2] < costs[0] + 30


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(FORMATS)), st.lists(st.integers(-200, 200).filter(bool), min_size=1, max_size=20), st.data()
)
def test_a_step_is_found_and_gives_every_value_back(dtype, codes, data):
    form = FORMATS[dtype]
    scale = torch.tensor(data.draw(st.floats(0.001, 1.0))).to(
        torch.float16 if dtype == torch.float16 else torch.bfloat16
    )
    values = (torch.tensor(codes, dtype=torch.float64) * (1 if dtype == torch.bfloat16 else scale.double())).to(dtype)
    values = values[values != 0]
    patterns = form.patterns(values)
    found = common_step(form.floats(patterns))
    if found is not None:
        step, multiples = found
        assert np.array_equal(form.nearest(step.values(multiples)), patterns)
        assert np.gcd.reduce(np.abs(multiples)) == 1
        writer = Writer()
        Steps().code(writer, step)
        assert Steps().code(Reader(writer.finish()), Step(1, 0)) == step
    assert torch.equal(form.numbers(patterns), values)
    if dtype == torch.float32:
        assert found is not None
        assert np.abs(found[1]).max() <= 200


def test_values_without_a_step():
    assert common_step(np.array([1.0, np.nan])) is None
    assert common_step(np.array([1.0, np.inf])) is None
    assert common_step(np.array([1e-30, 1e30])) is None
    assert common_step(np.array([])) is None


@given(st.integers(-(10**20), 10**20))
def test_zigzag_undone(number):
    assert unzigzag(zigzag(number)) == number
    assert zigzag(number) >= 0


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_codes_are_read_as_written(data):
    grid = Grid(data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    most = data.draw(st.sampled_from([(3, 3), (0, 5), (1, 0), (300, 40), (2000, 2000)]))
    columns = st.sets(st.integers(0, grid.size - 1)).map(lambda found: np.array(sorted(found), np.int64))
    hits = data.draw(st.lists(columns, min_size=1, max_size=5))
    one = st.integers(-most[0], most[1]).filter(bool)
    count = sum(map(len, hits))
    codes = np.array(data.draw(st.lists(one, min_size=count, max_size=count)), np.int64)
    writer = Writer()
    code_codes(writer, codes, hits, grid, most)
    assert np.array_equal(code_codes(Reader(writer.finish()), None, hits, grid, most), codes)


def test_signs_that_follow_their_neighbours_are_cheap():
    generator = np.random.default_rng(0)
    grid = Grid(1, 16, 16)
    hits = [np.arange(256)] * 8
    blocks = np.repeat(np.repeat(generator.choice([-1, 1], (8, 4, 4)), 4, axis=1), 4, axis=2).reshape(-1)
    noise = generator.choice([-1, 1], 2048)
    costs = []
    for codes in (blocks, noise):
        meter = Meter()
        code_codes(meter, codes, hits, grid, (1, 1))
        costs.append(meter.bits)
    assert costs[0] < 0.6 * costs[1]
    assert costs[1] < 2048 + 60


def test_layouts_of_the_lenets_and_of_others():
    assert layouts([(20, 1, 5, 5), (50, 20, 5, 5), (500, 800), (10, 500)]) == [
        Layout(20, Grid(1, 5, 5), False),
        Layout(50, Grid(20, 5, 5), True),
        Layout(500, Grid(50, 4, 4), True),
        Layout(10, Grid(500), True),
    ]
    assert [one.columns for one in layouts([(300, 784)])] == [Grid(1, 28, 28)]
    assert [one.columns for one in layouts([(5, 3072)])] == [Grid(3, 32, 32)]
    assert [one.columns for one in layouts([(5, 13)])] == [Grid(13)]
    assert [one.columns for one in layouts([(6, 4, 3)])] == [Grid(4, 1, 3)]
    assert [one.columns.size for one in layouts([(0, 3), (4, 0), (2, 4)])] == [3, 0, 4]


@pytest.mark.parametrize("grid", [Grid(1, 3, 4), Grid(3, 2, 2), Grid(5)])
def test_neighbours_against_coordinates(grid):
    for column in range(grid.size):
        channel, line, place = np.unravel_index(column, (grid.channels, grid.height, grid.width))
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                y, x = line + down, place + right
                inside = 0 <= y < grid.height and 0 <= x < grid.width
                wanted = (
                    [int(np.ravel_multi_index((channel, y, x), (grid.channels, grid.height, grid.width)))]
                    if inside
                    else []
                )
                assert grid.at(column, [(down, right)]) == wanted
