"""Range coding: what is written is read, in as many bytes as the probabilities say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meter import Meter

from bayeslim.coding.coders import Reader, Writer
from bayeslim.errors import CorruptFile

SYMBOL = st.one_of(
    st.tuples(st.just("uniform"), st.integers(1, 1 << 32), st.integers(0, 1 << 32)),
    st.tuples(st.just("bit"), st.integers(2, 1 << 32), st.integers(0, 1 << 32)),
    st.tuples(st.just("symbol"), st.lists(st.integers(1, 1 << 24), min_size=1, max_size=8), st.integers(0, 7)),
)


def send(coder, symbols, read=False):
    found = []
    for kind, size, value in symbols:
        if kind == "uniform":
            found.append(coder.uniform(0 if read else value % size, size))
        elif kind == "bit":
            found.append(coder.bit(0 if read else value % 2, 1 + value % (size - 1), size))
        else:
            starts = [0, *np.cumsum(size).tolist()]
            found.append(coder.symbol(0 if read else value % len(size), starts.__getitem__, len(size)))
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(SYMBOL, max_size=40))
def test_is_read_as_written_in_the_bits_that_the_meter_says(symbols):
    writer, meter = Writer(), Meter()
    written = send(writer, symbols)
    assert send(meter, symbols) == written
    data = writer.finish()
    reader = Reader(data)
    assert send(reader, symbols, read=True) == written
    assert writer.bits == pytest.approx(meter.bits, abs=0.01)
    assert reader.bits == pytest.approx(meter.bits, abs=0.01)
    assert len(data) <= meter.bits / 8 + 1.01


def test_carries_run_through_bytes_that_are_full():
    # the upper half of the interval again and again is a number just below one: a carry then runs through it all
    for tail in range(1, 40):
        writer = Writer()
        for _ in range(8 * tail):
            writer.bit(0, 1, 2)
        writer.uniform(2, 3)
        reader = Reader(writer.finish())
        assert all(reader.bit(0, 1, 2) == 0 for _ in range(8 * tail))
        assert reader.uniform(0, 3) == 2


def test_a_long_message_costs_its_entropy():
    generator = np.random.default_rng(0)
    bits = (generator.random(20_000) < 0.03).astype(int).tolist()
    writer = Writer()
    for bit in bits:
        writer.bit(bit, 3, 100)
    ones = sum(bits)
    ideal = -(ones * math.log2(0.03) + (len(bits) - ones) * math.log2(0.97)) / 8
    assert len(writer.finish()) <= ideal + 1.1


def test_nothing_is_no_bytes():
    assert Writer().finish() == b""


def test_reading_past_the_end_is_refused():
    reader = Reader(b"abc")
    with pytest.raises(CorruptFile, match="truncated"):
        [reader.uniform(0, 256) for _ in range(100)]


def test_a_part_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Writer().bit(1, 0, 10)
    with pytest.raises(ValueError, match="at most"):
        Writer().uniform(0, (1 << 32) + 1)
