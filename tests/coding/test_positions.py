"""Positions: round trips of every pattern, and sizes near the entropy of what made the pattern."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meter import Meter

from bayeslim.coding.coders import Reader, Writer
from bayeslim.coding.features import (
    BELOW,
    BESIDE,
    CHANNEL,
    COLUMN,
    CORNER,
    FEATURES,
    PLACE,
    POPULAR,
    RIGHT,
    ColumnFeatures,
)
from bayeslim.coding.fit_context import fit_context, gather_choices
from bayeslim.coding.geometry import Grid
from bayeslim.coding.positions import COEFFICIENTS, GAMMAS, ContextModel, code_columns, code_counts, is_sorted

GRIDS = [Grid(1), Grid(7), Grid(40), Grid(1, 6, 6), Grid(3, 4, 4), Grid(4, 1, 5), Grid(1, 20, 20)]


def send(coder, hits, rows, grid, feeders, model, ordered=False):
    model = model.code(coder)
    sizes = None if hits is None else [len(row) for row in hits]
    counts = code_counts(coder, sizes, rows, grid.size, ordered)
    return code_columns(coder, hits, counts, ColumnFeatures(grid, feeders), model, ordered)


def hits_of(mask):
    return [np.flatnonzero(row) for row in mask]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_every_pattern_is_read_as_written_with_every_model(data):
    grid = data.draw(st.sampled_from(GRIDS))
    rows = data.draw(st.integers(0, 8))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    density = data.draw(st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.9, 1.0]))
    hits = hits_of(generator.random((rows, grid.size)) < density)
    if ordered := data.draw(st.booleans()):
        hits.sort(key=lambda columns: (-len(columns), *columns.tolist()))
        assert is_sorted(hits)
    feeders = generator.integers(0, 5, grid.size) if data.draw(st.booleans()) else None
    coefficients = st.tuples(
        st.integers(1, len(COEFFICIENTS) - 1), *[st.integers(0, len(COEFFICIENTS) - 1)] * (FEATURES - 1)
    )
    model = ContextModel(data.draw(coefficients), data.draw(st.integers(0, GAMMAS)))
    writer = Writer()
    send(writer, hits, rows, grid, feeders, model, ordered)
    found = send(Reader(writer.finish()), None, rows, grid, feeders, ContextModel(), ordered)
    assert len(found) == rows
    assert all(np.array_equal(a, b) for a, b in zip(found, hits, strict=True))


def test_features_against_counting():
    generator = np.random.default_rng(0)
    grid = Grid(2, 4, 5)
    mask = generator.random((6, grid.size)) < 0.3
    features = ColumnFeatures(grid, None)
    for row in mask[:-1]:
        features.end_row(np.flatnonzero(row))
    past = mask[:-1].sum(0).reshape(2, 4, 5)
    padded = np.pad(past, ((0, 0), (1, 1), (1, 1)))
    beside = padded[:, 1:-1, :-2] + padded[:, 1:-1, 2:] + padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1]
    assert np.array_equal(features.values[COLUMN], past.reshape(-1))
    assert np.array_equal(features.values[BESIDE], beside.reshape(-1))
    assert np.array_equal(features.values[CHANNEL], np.repeat(past.sum((1, 2)), 20))
    assert np.array_equal(features.values[PLACE], np.tile(past.sum(0).reshape(-1), 2))
    for column in np.flatnonzero(mask[-1]).tolist():
        features.add_nonzero(column)
    here = np.pad(mask[-1].reshape(2, 4, 5).astype(int), ((0, 0), (1, 1), (1, 1)))
    right, below = here[:, 1:-1, :-2], here[:, :-2, 1:-1] + here[:, :-2, 2:]
    assert np.array_equal(features.values[RIGHT], right.reshape(-1))
    assert np.array_equal(features.values[BELOW], below.reshape(-1))
    assert np.array_equal(features.values[CORNER], here[:, :-2, :-2].reshape(-1))
    assert np.array_equal(features.values[POPULAR], ((right + below) * (past + beside)).reshape(-1))


def test_equal_weights_cost_the_number_of_patterns():
    # rows of known counts are one of C(n, k) equally probable patterns each: sparse and dense rows alike
    generator = np.random.default_rng(0)
    for size, count in ((784, 5), (784, 40), (784, 97), (300, 90), (64, 40)):
        hits = [np.sort(generator.choice(size, count, replace=False)) for _ in range(30)]
        meter = Meter()
        code_columns(meter, hits, [count] * 30, ColumnFeatures(Grid(size), None), ContextModel())
        ideal = 30 * math.log2(math.comb(size, count))
        assert meter.bits == pytest.approx(ideal, rel=0.01)


def test_the_estimate_by_which_coefficients_are_chosen_is_what_they_cost():
    generator = np.random.default_rng(0)
    grid = Grid(1, 12, 12)
    hits = hits_of(generator.random((40, 144)) < np.linspace(0.0, 0.15, 144))
    choices = gather_choices(hits, ColumnFeatures(grid, None))
    for coefficients in ((4, *[0] * 12), (3, 0, 0, 6, 2, 0, 0, 5, 5, 1, 3, 1, 0)):
        model = ContextModel(coefficients, 5)
        meter = Meter()
        code_columns(meter, hits, [len(row) for row in hits], ColumnFeatures(grid, None), model)
        extra = 4 * sum(coefficient > 0 for coefficient in coefficients[1:])
        assert choices.bits(model) - extra == pytest.approx(meter.bits, rel=0.03)


def test_full_rows_say_nothing_and_cost_nothing():
    size, generator = 50, np.random.default_rng(0)
    full, some = np.arange(size), np.sort(generator.choice(size, 20, replace=False))
    assert len(gather_choices([full, full], ColumnFeatures(Grid(size), None)).left) == 0
    assert len(gather_choices([full, some, full], ColumnFeatures(Grid(size), None)).left) == 20
    meter = Meter()
    found = code_columns(meter, [full, full], [size, size], ColumnFeatures(Grid(size), None), ContextModel())
    assert meter.bits == 0
    assert all(np.array_equal(row, full) for row in found)


def test_structure_is_found_and_paid_back():
    """Dead columns, and clusters in pictures: the chosen coefficients beat equal weights by far."""
    generator = np.random.default_rng(0)
    dead = (generator.random((60, 200)) < 0.08) & (np.arange(200) % 4 == 0)
    pictures = np.zeros((60, 20, 20), bool)
    for picture in pictures:
        for y, x in generator.integers(0, 17, (3, 2)):
            picture[y : y + 3, x : x + 3] |= generator.random((3, 3)) < 0.7
    for mask, grid, most in ((dead, Grid(200), 0.85), (pictures.reshape(60, 400), Grid(1, 20, 20), 0.75)):
        hits = hits_of(mask)
        model = fit_context(gather_choices(hits, ColumnFeatures(grid, None)))
        costs = []
        for one in (ContextModel(), model):
            meter = Meter()
            code_columns(meter, hits, [len(row) for row in hits], ColumnFeatures(grid, None), one)
            costs.append(meter.bits)
        assert costs[1] < most * costs[0]


def test_sorted_rows_save_about_the_bits_of_their_order():
    generator = np.random.default_rng(0)
    hits = hits_of(generator.random((200, 300)) < generator.gamma(0.7, size=(200, 1)) * 0.03)
    in_order = sorted(hits, key=lambda columns: (-len(columns), *columns.tolist()))
    assert not is_sorted(hits)
    costs = []
    for rows, ordered in ((hits, False), (in_order, True)):
        send(meter := Meter(), rows, 200, Grid(300), None, ContextModel(), ordered)
        costs.append(meter.bits)
    assert 0.6 * math.log2(math.factorial(200)) < costs[0] - costs[1] < 1.1 * math.log2(math.factorial(200))


def test_columns_of_dead_feeders_cost_almost_nothing():
    generator = np.random.default_rng(0)
    feeders = (generator.random(500) < 0.1) * generator.integers(1, 30, 500)
    mask = (generator.random((100, 500)) < 0.1) & (feeders > 0)
    hits, live = hits_of(mask), int((feeders > 0).sum())
    model = fit_context(gather_choices(hits, ColumnFeatures(Grid(500), feeders)))
    meter = Meter()
    code_columns(meter, hits, [len(row) for row in hits], ColumnFeatures(Grid(500), feeders), model)
    ideal = sum(math.log2(math.comb(live, len(row))) for row in hits)
    assert meter.bits < 1.03 * ideal + 64


def test_a_lenet5_mask_costs_its_entropy():
    """Unstructured masks of LeNet-5's shapes, with units of very different sizes: the entropy given those."""
    generator = np.random.default_rng(0)
    for rows, grid, nonzero in (
        (20, Grid(1, 5, 5), 160),
        (50, Grid(20, 5, 5), 500),
        (500, Grid(50, 4, 4), 800),
        (10, Grid(500), 240),
    ):
        strength = generator.gamma(0.3, size=(rows, 1)) + 1e-3
        chance = np.minimum(strength * nonzero / strength.sum() / grid.size, 0.9)
        hits = hits_of(generator.random((rows, grid.size)) < chance)
        counts = [len(row) for row in hits]
        model = fit_context(gather_choices(hits, ColumnFeatures(grid, None)))
        meter = Meter()
        code_counts(meter, counts, rows, grid.size)
        of_counts = meter.bits
        send(meter := Meter(), hits, rows, grid, None, model)
        ideal = sum(math.log2(math.comb(grid.size, count)) for count in counts)
        assert meter.bits - of_counts < 1.02 * ideal + 40
        frequencies = np.unique(counts, return_counts=True)[1] / rows
        assert of_counts < rows * -(frequencies * np.log2(frequencies)).sum() + 8 * len(frequencies) + 16
