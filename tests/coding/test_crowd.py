"""How many non-zeros rows are to have: the mean that is stored, and what it saves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.coding.coders import Meter, Reader, Writer
from bayeslim.coding.crowd import RATES, Crowd, closest_crowd
from bayeslim.coding.expected import expectations
from bayeslim.coding.logarithms import ONE
from bayeslim.coding.network import Passage
from bayeslim.coding.positions import code_counts
from bayeslim.errors import CorruptFile


@pytest.mark.parametrize("mean", [0.01, 0.3, 1, 7.5, 100, 5000])
def test_the_mean_is_that_which_was_asked_for(mean):
    crowd = closest_crowd(40 * mean, 40)
    for place in (1, 2, 30):
        bits = crowd.bits_of_more(place) / ONE
        assert 1 / (2**bits - 1) == pytest.approx(mean / place, rel=0.3)
    assert crowd.bits / ONE == pytest.approx(crowd.bits_of_more(1) / ONE, rel=1e-3)


def test_the_ends_of_the_range():
    assert closest_crowd(0.0, 7) == closest_crowd(1e-9, 7) == Crowd(0)
    assert closest_crowd(1e12, 1) == Crowd(RATES - 1)
    bits = [Crowd(rate).bits for rate in range(RATES)]
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] > 0


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("rate", [0, 12, RATES - 1])
def test_counts_are_read_as_written(falling, rate):
    counts = [300, 7, 7, 0, 1000, 2, 0, 0]
    counts = sorted(counts, reverse=True) if falling else counts
    writer = Writer()
    code_counts(writer, counts, len(counts), 1000, Crowd(rate).code(writer), falling)
    reader = Reader(writer.finish())
    assert code_counts(reader, None, len(counts), 1000, Crowd().code(reader), falling) == counts


@pytest.mark.parametrize("falling", [False, True])
def test_counts_as_expected_cost_little(falling):
    generator = np.random.default_rng(0)
    counts = (generator.geometric(0.1, 200) - 1).tolist()
    counts = sorted(counts, reverse=True) if falling else counts

    def bits(crowd):
        code_counts(meter := Meter(), counts, len(counts), 784, crowd, falling)
        return meter.bits

    right = bits(closest_crowd(sum(counts), len(counts)))
    assert right < min(bits(closest_crowd(sum(counts) * factor, len(counts))) for factor in (0.05, 20))


def test_more_non_zeros_than_columns_is_an_error():
    for falling in (False, True):
        writer = Writer()
        code_counts(writer, [6, 4, 3], 3, 6, Crowd(20), falling)
        with pytest.raises(CorruptFile, match="in rows of 5"):
            code_counts(Reader(writer.finish()), None, 3, 5, Crowd(20), falling)


def test_every_weight_starts_from_the_posteriors_number(monkeypatch):
    x, y = torch.randn(200, 16), torch.randint(0, 3, (200,))
    network = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 3))
    bnn = bl.bayesianize(network, bl.Laplace(structure="diag"), likelihood=bl.likelihoods.Categorical())
    bnn.fit([(x, y)])
    quantised = bl.quantise(bnn, bits=3)
    asked = []
    monkeypatch.setattr("bayeslim.coding.network.closest_crowd", lambda *of: asked.append(of) or closest_crowd(*of))
    tensors = quantised.network.state_dict()
    Passage(Writer(), tensors, tensors, expectations(quantised)).run()
    assert asked == [(pytest.approx(float(quantised.presence[name].sum())), tensors[name].shape[0]) for name in
                     ("0.weight", "2.weight")]  # fmt: skip
