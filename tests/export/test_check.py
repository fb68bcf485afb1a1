"""The comparison that every export has to pass."""

from __future__ import annotations

import pytest
import torch
from small_networks import FixedBatch, mlp

from bayeslim.compact.example import batches, rows_of
from bayeslim.errors import ShapeMismatch
from bayeslim.export.check import ExportFailed, difference, prove
from bayeslim.types import with_batch_size

INF, NAN = float("inf"), float("nan")


def test_the_difference_is_relative_to_the_largest_output():
    a, b = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -4.4])
    assert difference([a], [b]) == pytest.approx(0.1)
    assert difference([a, 100 * a], [b, 100 * a]) == pytest.approx(0.4 / 400)
    assert difference([a], [a]) == 0
    assert difference([], []) == 0


@pytest.mark.parametrize(
    ("expected", "actual", "gap"),
    [
        ([1.0, NAN], [1.0, NAN], 0),
        ([1.0, -INF], [1.0, -INF], 0),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, INF], [1.0, -INF], INF),
        ([1.0, 2.0], [1.0, INF], INF),
    ],
)
def test_values_that_are_not_finite(expected, actual, gap):
    found = difference([torch.tensor(expected)], [torch.tensor(actual)])
    assert found > 1e300 if gap else found == 0


def test_a_network_that_gives_nan_is_not_compared():
    with pytest.raises(ExportFailed, match="gives NaN on the example"):
        prove(torch.nn.Linear(2, 1), lambda x: torch.zeros(1, 1), [torch.full((1, 2), NAN)], "ONNX", 1e-6)


def test_other_shapes_are_infinitely_far():
    assert difference([torch.zeros(2)], [torch.zeros(3)]) == INF
    assert difference([torch.zeros(2)], []) == INF


def test_batches_are_cut_and_repeated():
    x, mask = torch.arange(6.0).view(3, 2), torch.arange(4)
    cut, kept = with_batch_size((x, mask), 2)
    assert torch.equal(cut, x[:2])
    assert torch.equal(kept, mask)
    assert torch.equal(with_batch_size({"x": x}, 7)["x"], torch.cat([x, x, x])[:7])
    assert rows_of(((x, mask),)) == 3
    with pytest.raises(ShapeMismatch, match="no tensor"):
        rows_of((1, torch.tensor(2.0)))


def test_a_network_of_one_batch_size_is_checked_on_that():
    assert len(batches(mlp(), torch.randn(1, 6))) == 2
    assert len(batches(FixedBatch(), torch.randn(4, 4))) == 1


def test_proofs():
    network = mlp().eval()
    inputs = batches(network, torch.randn(2, 6))
    assert prove(network, network, inputs, "own", 0.0) == 0
    with pytest.raises(ExportFailed, match="other outputs than the network on a batch of 2"):
        prove(network, lambda x: network(x) + 0.01, inputs, "own", 1e-5)
    with pytest.raises(ExportFailed, match=r"fails on a batch of 3.*not from len"):
        prove(network, lambda x: network(x) if len(x) == 2 else network(x[:, :1]), inputs, "own", 1e-5)
    with pytest.raises(ExportFailed, match=r"other outputs.*: shapes \[\(1, .*name it: squeeze"):
        prove(network, lambda x: network(x)[:1], inputs, "own", 1e-5)
