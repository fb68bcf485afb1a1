"""Decisions and metrics refuse data and numbers that mean nothing, and say which argument is meant."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import BayeslimError, NotFinite, ShapeMismatch
from bayeslim.likelihoods import Categorical, Gaussian

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3
LABELS = {"likelihood": Categorical()}
VALUES = {"likelihood": Gaussian(0.5)}
DECIDE = {
    "calibrate": bl.calibrate,
    "conformal": bl.conformal,
    "selective": lambda network, loader, **given: bl.selective(network, loader, 0.5, tolerance=1.0, **given),
    "selective per output": lambda network, loader, **given: bl.selective(
        network, loader, coverage=0.5, tolerance=1.0, per_output=True, **given
    ),
}
WRONG_CLASSES = [
    (torch.full_like(Y, 7), ShapeMismatch, "targets must be from 0 to 2. Got 7 to 7"),
    (torch.full_like(Y, -1), ShapeMismatch, "targets must be from 0 to 2. Got -1 to -1"),
    (Y + 0.5, ShapeMismatch, "whole numbers"),
    (Y * math.nan, NotFinite, "targets hold NaN"),
    (Y[:5], ShapeMismatch, "as many entries as the predictions"),
    (Y.reshape(8, 5), ShapeMismatch, "as many entries as the predictions"),
    (["a"] * 40, BayeslimError, "targets of type list"),
    (None, BayeslimError, "targets of type NoneType"),
]


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


@pytest.mark.parametrize("decide", DECIDE.values(), ids=DECIDE)
def test_targets_that_are_no_classes(decide, network):
    for targets, error, words in WRONG_CLASSES:
        with pytest.raises(error, match=words):
            decide(network, [(X, targets)], **LABELS)


@pytest.mark.parametrize("decide", DECIDE.values(), ids=DECIDE)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite(decide, network, value):
    y = torch.zeros(40, 3)
    y[3, 1] = value
    with pytest.raises(NotFinite, match="targets hold NaN"):
        decide(network, [(X, y)], **VALUES)
    with pytest.raises(NotFinite, match="predictor gave NaN or infinite values"):
        decide(network, [(X * value, torch.zeros(40, 3))], **VALUES)


@pytest.mark.parametrize("decide", DECIDE.values(), ids=DECIDE)
def test_data_that_are_no_batches(decide, network):
    with pytest.raises(TypeError, match="must be a loader of"):
        decide(network, 3, **LABELS)
    with pytest.raises(BayeslimError, match=r"gave no batches|at least two batches"):
        decide(network, [], **LABELS)


@pytest.mark.parametrize("decide", DECIDE.values(), ids=DECIDE)
def test_batches_without_examples(decide, network):
    with pytest.raises(BayeslimError, match="no batches with examples"):
        decide(network, [(X[:0], Y[:0])], **LABELS)
    decide(network, [(X[:9], Y[:9]), (X[:0], Y[:0]), (X[9:], Y[9:])], **LABELS)


@pytest.mark.parametrize("decide", DECIDE.values(), ids=DECIDE)
def test_data_without_a_target(decide, network):
    with pytest.raises(BayeslimError, match="All validation targets are -100"):
        decide(network, [(X, torch.full_like(Y, -100))], **LABELS)


@pytest.mark.parametrize("per_output", [False, True])
def test_examples_without_a_target_are_no_right_answers(network, per_output):
    targets = torch.where(torch.arange(40) < 20, Y, -100)
    some = bl.selective(network, [(X, targets)], coverage=0.5, per_output=per_output, **LABELS)
    told = bl.selective(network, [(X[:20], Y[:20])], coverage=0.5, per_output=per_output, **LABELS)
    assert some.coverage >= 0.5
    assert (some.risk, some.coverage, some.threshold) == (told.risk, told.coverage, told.threshold)
    assert bl.conformal(network, [(X, targets)], **LABELS).num_data == 20


def test_targets_in_numpy(network):
    assert bl.conformal(network, [(X, Y.numpy())], **LABELS).threshold == bl.conformal(
        network, [(X, Y)], **LABELS
    ).threshold  # fmt: skip


def test_sets_and_intervals_cover_targets_of_their_shape(network):
    sets = bl.conformal(network, [(X, Y)], **LABELS)(X)
    assert sets.covers(Y).shape == Y.shape
    assert torch.equal(sets.covers(torch.where(Y == 0, -100, Y)), sets.covers(Y) & (Y != 0))
    for wrong in (Y[:3], Y + 5):
        with pytest.raises(ShapeMismatch):
            sets.covers(wrong)
    with pytest.raises(ShapeMismatch, match="as many entries"):
        bl.conformal(network, [(X, torch.zeros(40, 3))], **VALUES)(X).covers(torch.zeros(40))


def test_no_interval_ends_before_it_begins():
    x = torch.cat([torch.zeros(40, 1), torch.linspace(-6, 0, 40)[:, None]], 1)  # means, and log variances too large
    made = bl.conformal(nn.Identity(), [(x, torch.zeros(40, 1))], score="cqr", likelihood=Gaussian("heteroscedastic"))
    assert made.threshold < 0
    assert float(made(x).widths.min()) == 0


@pytest.mark.parametrize("value", [math.nan, -0.1, 0, 1, 2.0, True, "0.9"])
def test_probabilities(network, value):
    with pytest.raises((TypeError, ValueError), match="coverage must be a finite number above 0 and below 1"):
        bl.conformal(network, [(X, Y)], value, **LABELS)
    for name in ("max_risk", "coverage", "confidence"):
        given = {"max_risk": 0.1} | {name: value} if name == "confidence" else {name: value}
        with pytest.raises((TypeError, ValueError), match=f"{name} must be a finite number"):
            bl.selective(network, [(X, Y)], **given, **LABELS)


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, True, "1"])
def test_tolerances(network, value):
    with pytest.raises((TypeError, ValueError), match="tolerance must be a finite number"):
        bl.selective(network, [(X, X)], 0.1, tolerance=value, **VALUES)


def test_inputs_to_label(network):
    bnn = bl.bayesianize(network, bl.Variational(), **LABELS)
    for count in (0, -1, 1.5, True, "3", math.nan):
        with pytest.raises(ValueError, match="count must be a whole number"):
            bl.acquire(bnn, X, count)
    with pytest.raises(ValueError, match="count must be from 1 to the size of the pool, 40"):
        bl.acquire(bnn, X, 41)
    with pytest.raises(NotFinite):
        bl.acquire(network, X * math.nan, rule="entropy", **LABELS)


def test_alarms_of_nothing(network):
    for inside, outside, words in (([(X,)], [], "no batches"), ([(X * math.nan,)], [(X,)], "NaN")):
        with pytest.raises(BayeslimError, match=words):
            bl.alarms(network, inside, outside, **LABELS)


@pytest.mark.parametrize("attack", [bl.fgsm, bl.pgd])
def test_attacks_that_mean_nothing(attack, network):
    wrong = [
        *(({"epsilon": value}, "epsilon must be a finite number") for value in (-1, math.nan, math.inf, True, "1")),
        *(({"samples": value}, "samples must be a whole number") for value in (0, 1.5, True)),
        *(({"bounds": value}, "bounds must be") for value in ((1, 0), (0, math.nan), 3)),
        ({"x": X * math.nan}, "x holds NaN"),
        ({"x": X.long()}, "x must hold real numbers"),
        ({"x": X.numpy()}, "x must be a tensor. Got ndarray"),
        ({"y": Y * math.nan}, "y holds NaN"),
        ({"y": Y + 7}, "targets from 0 to 2"),
        ({"likelihood": "categorical"}, "needs likelihood="),
        ({"network": 3}, "needs a Bayesian network"),
    ]
    if attack is bl.pgd:
        wrong += [({"steps": value}, "steps must be a whole number") for value in (0, -1, 1.5)]
    for given, words in wrong:
        with pytest.raises((TypeError, ValueError), match=words):
            attack(**({"network": network, "x": X, "y": Y, "epsilon": 0.1} | LABELS | given))


def test_metrics_name_what_is_wrong():
    probs, y = torch.full((4, 2), 0.5), torch.zeros(4)
    for bins in (0, -1, 1.5, True, math.nan):
        with pytest.raises(ValueError, match="bins must be a whole number"):
            bl.metrics.calibration(probs, y.long(), bins=bins)
    for wrong in (probs * math.nan, probs * 2):
        with pytest.raises(ValueError, match="Probabilities must be non-negative"):
            bl.metrics.nll(wrong, y.long())
    for scores in (y * math.nan, y[:0], [1.0]):
        with pytest.raises((TypeError, ValueError), match=r"auroc|Metrics need tensors"):
            bl.metrics.auroc(y, scores)
    with pytest.raises(TypeError, match=r"Metrics need tensors\. Got float"):
        bl.metrics.gaussian_nll(y, 1.0, y)


@pytest.fixture(scope="module")
def fitted() -> bl.Bayesian:
    torch.manual_seed(0)
    bnn = bl.bayesianize(nn.Linear(3, 3), bl.Laplace(structure="diag"), **LABELS)
    bnn.fit([(X, Y)], progress=False)
    return bnn


@pytest.mark.parametrize(
    ("validate", "error", "words"),
    [
        ([(X, torch.full_like(Y, 7))], ShapeMismatch, "targets of validate=... must be from 0 to 2"),
        ([(X, torch.full_like(Y, -1))], ShapeMismatch, "targets of validate=... must be from 0 to 2"),
        ([(X, Y * math.nan)], BayeslimError, "validation data hold NaN"),
        ([(X, ["a"] * 40)], TypeError, "targets of validate=... must be tensors"),
        ([(X, Y[:4])], ShapeMismatch, "validation targets must have as many entries"),
        (3, TypeError, "validate must be a loader of batches. Got int"),
        (X, TypeError, "validate must be a loader of batches. Got Tensor"),
        (iter([(X, Y)]), TypeError, "validate is read once for every cut"),
    ],
)
def test_validation_data_of_a_search(fitted, validate, error, words):
    with pytest.raises(error, match=words):
        bl.prune(fitted, bl.Budget(max_error_increase=5), validate=validate, progress=False)


def test_values_have_no_class_temperatures(network):
    with pytest.raises(ValueError, match=r'predictions of classes\. Got values.*pass what="temperature"'):
        bl.calibrate(network, [(X, torch.zeros(40, 3))], "class temperatures", **VALUES)
