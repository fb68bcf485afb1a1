"""Metrics against hand-computed cases and slow definitions; streamed scores against whole-set scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslim import metrics
from bayeslim.errors import ShapeMismatch

PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.0, 1.0, 0.0]])
TARGETS = torch.tensor([0, 2, 2, 1])


def test_by_hand():
    assert metrics.error(PROBS, TARGETS) == 0.25
    assert metrics.nll(PROBS, TARGETS) == pytest.approx(-(math.log(0.7) + math.log(0.3) + math.log(0.4)) / 4, rel=1e-6)
    squares = (0.09 + 0.04 + 0.01) + (0.01 + 0.36 + 0.49) + (0.09 + 0.09 + 0.36) + 0
    assert metrics.brier(PROBS, TARGETS) == pytest.approx(squares / 4, rel=1e-6)


def test_calibration_by_hand():
    # five bins: 0.4 lies on an edge and belongs to (0.2, 0.4]; 0.6 to (0.4, 0.6]; 0.7 to (0.6, 0.8]; 1.0 to (0.8, 1.0]
    curve = metrics.calibration(PROBS, TARGETS, bins=5)
    assert curve.count.tolist() == [0, 1, 1, 1, 1]
    assert curve.confidence.tolist() == pytest.approx([0, 0.4, 0.6, 0.7, 1.0])
    assert curve.accuracy.tolist() == [0, 1, 0, 1, 1]
    assert curve.edges.tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert curve.ece == pytest.approx((0.6 + 0.6 + 0.3 + 0) / 4, rel=1e-6)
    assert curve.mce == pytest.approx(0.6, rel=1e-6)
    assert metrics.expected_calibration_error(PROBS, TARGETS, bins=5) == curve.ece
    assert "ece 0.3750" in repr(curve)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [3, 5, 10, 15])
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(bins, dtype):
    for b in range((bins + 1) // 2, bins + 1):
        p = torch.tensor(b / bins, dtype=dtype)
        curve = metrics.calibration(torch.stack([p, 1 - p]).unsqueeze(0), torch.tensor([0]), bins=bins)
        assert curve.count.argmax() == b - 1


def test_adaptive_bins_hold_equally_many():
    confidence = torch.rand(1000, generator=torch.Generator().manual_seed(0)).double() / 2 + 0.5
    curve = metrics.calibration(
        torch.stack([confidence, 1 - confidence], -1), torch.zeros(1000).long(), 8, adaptive=True
    )
    assert curve.count.tolist() == [125] * 8
    ordered = confidence.sort().values.view(8, 125)
    torch.testing.assert_close(curve.confidence, ordered.mean(1))


def test_adaptive_bins_never_tear_ties_apart():
    # 60 predictions at 0.6, half of them right, and 40 at 0.9, all right, in any order
    probs = torch.tensor([[0.6, 0.4]] * 60 + [[0.9, 0.1]] * 40)
    targets = torch.tensor([0, 1] * 30 + [0] * 40)
    for seed in range(3):
        order = torch.randperm(100, generator=torch.Generator().manual_seed(seed))
        curve = metrics.calibration(probs[order], targets[order], bins=10, adaptive=True)
        assert curve.count.tolist() == [60, 40]
        assert curve.ece == pytest.approx(0.6 * 0.1 + 0.4 * 0.1, rel=1e-5)


def test_adaptive_with_one_prediction_or_all_the_same():
    assert metrics.calibration(torch.tensor([[0.8, 0.2]]), torch.tensor([0]), adaptive=True).ece == pytest.approx(0.2)
    ones = torch.tensor([[1.0, 0.0]] * 7)
    assert metrics.calibration(ones, torch.zeros(7).long(), adaptive=True).count.sum() == 7


def test_a_calibrated_predictor_has_little_calibration_error():
    g = torch.Generator().manual_seed(0)
    probs = torch.rand(50_000, 3, generator=g).softmax(-1)
    targets = torch.multinomial(probs, 1, generator=g).squeeze(1)
    assert metrics.expected_calibration_error(probs, targets) < 0.01
    overconfident = (3 * probs.log()).softmax(-1)
    assert metrics.expected_calibration_error(overconfident, targets) > 0.1


def test_an_underflowed_probability_is_finite_and_large():
    assert 80 < metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) < 90


def test_positions_and_low_precision():
    probs = torch.rand(4, 6, 3).softmax(-1)
    targets = torch.randint(0, 3, (4, 6))
    flat = metrics.nll(probs.view(24, 3), targets.view(24))
    assert metrics.nll(probs, targets) == flat
    assert metrics.nll(probs.bfloat16(), targets) == pytest.approx(flat, abs=0.01)
    assert metrics.expected_calibration_error(probs.half(), targets) >= 0


def slow_auroc(inside: list[float], outside: list[float]) -> float:
    return sum((o > i) + 0.5 * (o == i) for i in inside for o in outside) / (len(inside) * len(outside))


def test_auroc_by_hand():
    assert metrics.auroc(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])) == 1
    assert metrics.auroc(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0])) == 0
    assert metrics.auroc(torch.tensor([1.0, 1.0]), torch.tensor([1.0])) == 0.5
    assert metrics.auroc(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0])) == (1.5 + 3) / 6


scores = st.lists(st.integers(-3, 3).map(float) | st.just(float("inf")), min_size=1, max_size=20)


@settings(max_examples=20, deadline=None)
@given(scores, scores)
def test_auroc_is_its_definition(inside, outside):
    a, b = torch.tensor(inside), torch.tensor(outside)
    assert metrics.auroc(a, b) == pytest.approx(slow_auroc(inside, outside))
    assert metrics.auroc(a, b) + metrics.auroc(b, a) == pytest.approx(1)


def slow_ece(probs: torch.Tensor, targets: torch.Tensor, bins: int) -> float:
    total = 0.0
    for b in range(bins):
        members = []
        for p, y in zip(probs, targets, strict=True):
            confidence = p.max().item()
            if b / bins < confidence <= (b + 1) / bins:
                members.append((confidence, float(p.argmax() == y)))
        if members:
            gap = sum(a for _, a in members) - sum(c for c, _ in members)
            total += abs(gap) / len(probs)
    return total


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.lists(st.integers(1, 39), max_size=5), st.integers(1, 20))
def test_streamed_classification_equals_the_whole_for_any_batches(seed, count, cuts, bins):
    g = torch.Generator().manual_seed(seed)
    probs = (4 * torch.randn(count, 3, generator=g)).double().softmax(-1)
    targets = torch.randint(0, 3, (count,), generator=g)
    stream = metrics.Classification(bins)
    for p, y in zip(probs.tensor_split(sorted(cuts)), targets.tensor_split(sorted(cuts)), strict=True):
        if len(y):
            stream.update(p, y)
    result = stream.compute()
    assert result.count == count
    assert result.error == pytest.approx(metrics.error(probs, targets))
    assert result.nll == pytest.approx(metrics.nll(probs, targets))
    assert result.brier == pytest.approx(metrics.brier(probs, targets))
    assert result.ece == pytest.approx(metrics.expected_calibration_error(probs, targets, bins))
    assert result.ece == pytest.approx(slow_ece(probs, targets, bins))
    assert result.brier == pytest.approx(
        float((probs - torch.nn.functional.one_hot(targets, 3)).square().sum(-1).mean())
    )
    assert result.nll == pytest.approx(float(torch.nn.functional.nll_loss(probs.log(), targets)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.lists(st.integers(1, 39), max_size=5))
def test_streamed_regression_equals_the_whole_for_any_batches(seed, count, cuts):
    g = torch.Generator().manual_seed(seed)
    mean, targets = torch.randn(2, count, 2, generator=g)
    variance = torch.rand(count, 2, generator=g) + 0.1
    stream = metrics.Regression()
    for batch in zip(*(t.tensor_split(sorted(cuts)) for t in (mean, variance, targets)), strict=True):
        if len(batch[0]):
            stream.update(*batch)
    result = stream.compute()
    assert result.count == 2 * count
    assert result.rmse == pytest.approx(metrics.rmse(mean, targets))
    assert result.nll == pytest.approx(metrics.gaussian_nll(mean, variance, targets))
    oracle = -torch.distributions.Normal(mean.double(), variance.double().sqrt()).log_prob(targets.double()).mean()
    assert result.nll == pytest.approx(float(oracle))


def test_regression_by_hand():
    mean, targets = torch.tensor([0.0, 1.0]), torch.tensor([3.0, 5.0])
    assert metrics.rmse(mean, targets) == pytest.approx(math.sqrt((9 + 16) / 2))
    expected = 0.5 * math.log(2 * math.pi) + (9 / 2 + (0.5 * math.log(4) + 16 / 8)) / 2
    assert metrics.gaussian_nll(mean, torch.tensor([1.0, 4.0]), targets) == pytest.approx(expected)


def test_results_are_readable_and_reset_forgets():
    stream = metrics.Classification()
    stream.update(PROBS, TARGETS)
    assert repr(stream.compute()).startswith("error 25.00 %, nll ")
    stream.reset()
    with pytest.raises(ShapeMismatch, match="update"):
        stream.compute()
    with pytest.raises(ShapeMismatch, match="update"):
        metrics.Regression().compute()


@pytest.mark.parametrize(
    ("probs", "targets", "words"),
    [
        (torch.randn(4, 3) * 5, torch.zeros(4).long(), r"softmax"),
        (torch.full((4, 3), float("nan")), torch.zeros(4).long(), r"sum to 1"),
        (torch.rand(4), torch.zeros(4).long(), r"torch.stack"),
        (torch.rand(4, 3).softmax(-1), torch.zeros(5).long(), r"\(4, 3\) and \(5,\)"),
        (torch.rand(4, 3).softmax(-1), torch.zeros(4), r"class indices"),
        (torch.rand(4, 3).softmax(-1), torch.full((4,), 3), r"0 ... 2. Got 3 to 3"),
        (torch.rand(4, 3).softmax(-1), torch.full((4,), -100), r"Leave out"),
        (torch.rand(0, 3), torch.zeros(0).long(), r"at least one example"),
    ],
)
def test_wrong_class_predictions_are_refused_and_leave_no_trace(probs, targets, words):
    stream = metrics.Classification()
    stream.update(PROBS, TARGETS)
    with pytest.raises(ValueError, match=words):
        stream.update(probs, targets)
    assert stream.compute().count == 4


def test_wrong_values_are_refused():
    ones = torch.ones(3)
    with pytest.raises(ShapeMismatch, match=r"\(3, 1\) and \(3,\)"):
        metrics.rmse(ones.unsqueeze(1), ones)
    with pytest.raises(ShapeMismatch, match="variances"):
        metrics.gaussian_nll(ones, ones[:1], ones)
    with pytest.raises(ValueError, match=r"positive. Got 0"):
        metrics.gaussian_nll(ones, 0 * ones, ones)
    with pytest.raises(ShapeMismatch, match="at least one example"):
        metrics.rmse(ones[:0], ones[:0])
    with pytest.raises(ValueError, match="NaN"):
        metrics.auroc(ones, ones * float("nan"))
    with pytest.raises(ShapeMismatch, match="both sides"):
        metrics.auroc(ones, ones[:0])
    with pytest.raises(ValueError, match="bins must be a whole number, at least 1"):
        metrics.Classification(bins=0)


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        (metrics.error, (np.full((3, 2), 0.5), torch.zeros(3).long())),
        (metrics.nll, (torch.full((3, 2), 0.5), [0, 1, 0])),
        (metrics.rmse, (np.zeros(3), torch.zeros(3))),
        (metrics.gaussian_nll, (torch.zeros(3), torch.ones(3), np.zeros(3))),
    ],
)
def test_arrays_are_no_tensors(metric, values):
    with pytest.raises(TypeError, match=r"need tensors. Got (ndarray|list). Use torch.as_tensor"):
        metric(*values)
