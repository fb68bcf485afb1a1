"""The note on time says what was measured, and gives a reason only where the measurements show it."""

from __future__ import annotations

from dataclasses import replace

from bayeslim.app.benchmark import Benchmark, Size
from bayeslim.app.compress.notes import not_faster

DENSE = Size(parameters=1000, nonzeros=1000, flops=2000, folder_bytes=0, peak_bytes=0, file_bytes={})
FEWER_UNITS = Size(parameters=100, nonzeros=100, flops=200, folder_bytes=0, peak_bytes=0, file_bytes={})
SINGLE_ZEROS = Size(parameters=1000, nonzeros=50, flops=2000, folder_bytes=0, peak_bytes=0, file_bytes={})


def timed(slim: Size, microseconds: dict[tuple[str, int], tuple[float, float]], **skipped: str) -> Benchmark:
    """Build a benchmark from the times of dense and slim, by runtime and batch size."""
    seconds = {
        (name, runtime, batch): (1e-6 * value,) * 2
        for (runtime, batch), both in microseconds.items()
        for name, value in zip(("dense", "slim"), both, strict=True)
    }
    return Benchmark({"dense": DENSE, "slim": slim}, seconds, {}, skipped)


def test_nothing_is_said_where_every_runtime_gains():
    assert not_faster(timed(FEWER_UNITS, {("eager", 1): (80, 40), ("C", 1): (10, 1)})) == []


def test_the_overhead_of_calls_is_blamed_where_units_were_cut():
    times = {("eager", 1): (87, 80), ("eager", 64): (300, 110), ("C", 1): (14, 1.5), ("C", 64): (800, 90)}
    (note,) = not_faster(timed(FEWER_UNITS, times))
    assert note.startswith("With one input in a call, the slim network is not much faster than the dense one in eager")
    assert "in eager PyTorch (dense 87 µs, slim 80 µs)." in note
    assert "arithmetic fell to 10.0 %, but the network is so small that the overhead of a call" in note
    assert "with 64 inputs in a call, each takes less than half as long" in note
    assert "least time in the C library, which leaves zeros out: dense 14 µs, slim 1.5 µs." in note
    assert "single zeros" not in note
    (note,) = not_faster(timed(replace(FEWER_UNITS, nonzeros=40), times))
    assert "overhead of a call" in note
    assert "60.0 % of its weights are single zeros, which dense kernels do not skip" in note


def test_single_zeros_are_blamed_only_where_there_are_some():
    times = {("eager", 1): (87, 86), ("eager", 64): (300, 299), ("onnxruntime", 1): (20, 20), ("C", 1): (14, 1)}
    (note,) = not_faster(timed(SINGLE_ZEROS, {**times, ("onnxruntime", 64): (99, 99), ("C", 64): (900, 60)}))
    assert "95.0 % of its weights are single zeros, and dense kernels multiply" in note
    assert note.count("single zeros") == 1
    assert "overhead" not in note
    assert "least time in the C library" in note
    (note,) = not_faster(timed(DENSE, {("eager", 1): (87, 86)}))
    assert "Little was cut: 100.0 % of the arithmetic is left" in note
    assert "single zeros" not in note


def test_c_is_not_recommended_where_it_is_slower_or_was_not_measured():
    times = {("eager", 1): (87, 86), ("C", 1): (400, 90)}
    (note,) = not_faster(timed(SINGLE_ZEROS, times))
    assert note.endswith('Cut whole units (granularity="unit") for smaller layers.')
    (note,) = not_faster(timed(SINGLE_ZEROS, {("eager", 1): (87, 86)}, C="no LSTM in C."))
    assert note.endswith("was not measured: no LSTM in C.")


def test_a_runtime_that_is_fast_anyway_does_not_hide_what_would_help():
    (note,) = not_faster(timed(SINGLE_ZEROS, {("eager", 1): (16, 16), ("onnxruntime", 1): (7, 7)}))
    assert "It takes the least time in onnxruntime: dense 7 µs, slim 7 µs. Cut whole units" in note
    assert note.endswith("C, which leaves zeros out, was not measured: it needs a C compiler.")


def test_no_reason_is_made_up():
    unclear = "arithmetic fell to 10.0 %; the measurements do not show why the time did not"
    slow_arithmetic = {("eager", 1): (87, 80), ("eager", 64): (5500, 5100)}
    one_batch_size = {("eager", 1): (87, 80)}
    for times in (slow_arithmetic, one_batch_size):
        assert unclear in not_faster(timed(FEWER_UNITS, times))[0]


def test_runtimes_with_other_reasons_are_told_apart():
    times = {
        ("eager", 1): (87, 80),
        ("eager", 64): (300, 110),
        ("onnxruntime", 1): (9, 9),
        ("onnxruntime", 64): (99, 570),
    }
    (note,) = not_faster(timed(FEWER_UNITS, times))
    assert "In eager PyTorch: its arithmetic fell to 10.0 %, but" in note
    assert "In onnxruntime: its arithmetic fell to 10.0 %; the measurements" in note
    assert "least time in onnxruntime: dense 9 µs, slim 9 µs" in note
