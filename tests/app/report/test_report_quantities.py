"""Quantities as people read them: the unit is that of the rounded number."""

from __future__ import annotations

import pytest

from bayeslim.app.report.quantities import duration, number, size


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 µs"),
        (0.0009994, "999 µs"),
        (0.0009996, "1 ms"),
        (0.9996, "1 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min 0 s"),
        (119.4, "1 min 59 s"),
        (119.7, "2 min 0 s"),
    ],
)
def test_a_duration_has_the_unit_of_its_rounded_number(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999.6, "1 kB"),
        (999_400, "999 kB"),
        (999_700, "1 MB"),
        (999_700_000, "1 GB"),
        (1_234_500_000_000, "1,234 GB"),
    ],
)
def test_a_size_has_the_unit_of_its_rounded_number(count, words):
    assert size(count) == words


def test_a_number_is_not_written_with_an_exponent_for_being_rounded_up():
    assert [number(999.4), number(999.6), number(-999.6), number(9999.6, 4)] == ["999", "1,000", "-1,000", "10,000"]
