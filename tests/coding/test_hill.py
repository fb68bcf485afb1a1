"""Hills: their formula, the closest one, and what they save where a posterior knows the middle."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bayeslim as bl
from bayeslim.coding.coders import Meter, Reader, Writer
from bayeslim.coding.evidence import Evidence
from bayeslim.coding.fit_context import best_start
from bayeslim.coding.geometry import Grid
from bayeslim.coding.hill import STEEPNESSES, TOP_BITS, WIDTHS, Hill, Slope, closest_hills
from bayeslim.coding.positions import code_columns

GRID = Grid(2, 9, 12)
HILLS = st.builds(
    Hill,
    st.builds(Slope, st.integers(0, 16), st.integers(0, WIDTHS - 1)),
    st.builds(Slope, st.integers(0, 22), st.integers(0, WIDTHS - 1)),
    st.integers(0, STEEPNESSES - 1),
)


def formula(hill: Hill, grid: Grid) -> np.ndarray:
    """In floating point."""
    squares = []
    for slope, length in ((hill.lines, grid.height), (hill.places, grid.width)):
        width = max(1, math.floor(2 * length * 2 ** (-slope.width / 3) + 1e-6)) / 2
        squares.append(((np.arange(length) - slope.centre / 2) / width) ** 2)
    distances = np.sqrt(squares[0][:, None] + squares[1])
    heights = 2**TOP_BITS * np.exp2(-np.minimum(distances ** (2 ** (1 + hill.steepness)), 100.0))
    return np.tile(np.maximum(heights, 1.0).reshape(-1), grid.channels)


@given(HILLS)
def test_hills_in_integers_are_their_formula(hill):
    assert np.allclose(hill.heights(GRID), formula(hill, GRID), atol=1.01)


@given(HILLS)
def test_hills_are_read_as_written(hill):
    writer = Writer()
    hill.code(writer, GRID)
    assert Hill().code(Reader(writer.finish()), GRID) == hill


@settings(max_examples=20, deadline=None)
@given(st.integers(6, 10), st.integers(8, 14), st.integers(3, 6), st.integers(3, 6), st.integers(0, STEEPNESSES - 1))
def test_the_closest_hill_to_a_hill_is_as_close_as_itself(line, place, high, wide, steepness):
    hill = Hill(Slope(line, high), Slope(place, wide), steepness)
    expected = hill.heights(GRID).astype(float)
    found = closest_hills(expected, GRID)[steepness]

    def distance(one):
        return -float(expected @ np.log2(one.heights(GRID) / one.heights(GRID).sum())) / expected.sum()

    assert distance(found) < distance(hill) + 0.01


def test_no_hill_without_a_picture_or_without_non_zeros():
    assert closest_hills(np.ones(30), Grid(30)) == []
    assert closest_hills(np.zeros(GRID.size), GRID) == []


def test_what_is_expected_saves_bits_and_no_more_than_it_costs_where_it_is_wrong():
    generator = np.random.default_rng(0)
    grid = Grid(1, 20, 20)
    truth = Hill(Slope(20, 6), Slope(20, 6), 1).heights(grid) - 1.0
    mask = generator.random((40, 400)) < truth / truth.sum() * 8
    hits = [np.flatnonzero(row) for row in mask]

    def bits(expected):
        hill, taste = best_start(hits, grid, None, expected)
        meter = Meter()
        if hill is not None:
            hill.code(meter, grid)
        code_columns(meter, hits, [len(row) for row in hits], Evidence(grid, None, hill), taste)
        return meter.bits, hill

    known, hill = bits(truth * 8 / truth.sum() * 40)
    flat, none = bits(np.zeros(400))
    wrong, _ = bits(truth.max() - truth)
    assert hill is not None
    assert none is None
    assert known < 0.96 * flat
    assert wrong < 1.005 * flat


def test_the_posteriors_presence_goes_into_the_file_and_changes_no_value(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(400, 30), nn.ReLU(), nn.Linear(30, 3))
    y, x = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
    middle = torch.exp(-((y - 10) ** 2 + (x - 10) ** 2) / 20).flatten()
    with torch.no_grad():
        network[0].weight.mul_((torch.rand(30, 400) < 0.5 * middle).float())
    likelihood, prior = bl.likelihoods.Categorical(), bl.priors.Normal(0.1)
    bnn = bl.bayesianize(network, bl.Laplace(structure="diag"), likelihood=likelihood, prior=prior)
    bnn.masks = {"0.weight": network[0].weight.detach() != 0}
    bnn.fit([(torch.randn(100, 400), torch.randint(0, 3, (100,)))])
    quantised = bl.quantise(bnn, bits=4)
    assert quantised.presence["0.weight"].shape == (400,)
    assert quantised.presence["0.weight"].sum() <= quantised.kept["0.weight"]
    nothing = {name: torch.zeros_like(present) for name, present in quantised.presence.items()}
    sizes = []
    for name, one in (("own", quantised), ("other", replace(quantised, presence=nothing))):
        sizes.append(bl.encode(one, tmp_path / name).total("positions"))
        decoded = bl.decode(tmp_path / name, model=network)
        for key, value in quantised.network.state_dict().items():
            assert torch.equal(decoded.state_dict()[key], value)
    assert sizes[0] < sizes[1]
