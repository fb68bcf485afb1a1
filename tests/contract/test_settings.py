"""Every setting of every registered class that must be a number, or True or False, is checked by its name."""

from __future__ import annotations

import functools
import math
from dataclasses import fields

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import check_number, check_whole
from bayeslim.io.registry import all_registered, registered

NEEDED = {"warmup": {"end": 5.0}, "cyclic": {"period": 2.0}}
WRONG = {
    "float": (float("nan"), True, "1", [1.0], 1j),
    "int": (math.nan, 1.5, True, "1", [1]),
    "bool": (math.nan, 1, "yes", None),
}
SETTINGS = [
    pytest.param(registered(kind, name), NEEDED.get(name, {}), field.name, wrong, id=f"{kind}-{name}-{field.name}")
    for kind in ("method", "family", "gate", "schedule")
    for name in all_registered(kind)
    if registered(kind, name).__module__.startswith("bayeslim.")
    for field in fields(registered(kind, name))
    if field.init and (wrong := WRONG.get(str(field.type).removesuffix(" | None"))) is not None
]


@pytest.mark.parametrize(("settings", "needed", "name", "wrong"), SETTINGS)
def test_numbers_and_flags_are_checked_by_name(settings, needed, name, wrong):
    for value in wrong:
        with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
            settings(**(needed | {name: value}))


def test_infinity_is_for_few():
    assert bl.Variational(renyi=-math.inf, samples=2).renyi == -math.inf
    with pytest.raises(ValueError, match="std_rate must be a finite number"):
        bl.Variational(std_rate=math.inf)


LIKELIHOODS = [
    (bl.likelihoods.Gaussian, "noise", (math.nan, math.inf, 0, -1.0, True, None, [1.0])),
    (bl.likelihoods.Gaussian, "initial_noise", (math.nan, math.inf, 0, -1.0, True, None, "1")),
    (bl.likelihoods.Categorical, "class_dim", (math.nan, 0, True, None, "1", 1.0)),
    (bl.likelihoods.Categorical, "ignore_index", (math.nan, True, None, "1", 1.0)),
]


@pytest.mark.parametrize(("likelihood", "name", "wrong"), LIKELIHOODS)
def test_arguments_of_likelihoods(likelihood, name, wrong):
    for value in wrong:
        with pytest.raises((TypeError, ValueError), match=f"{name} must"):
            likelihood(**{name: value})


@pytest.mark.parametrize("period", [0, -1, math.inf])
def test_schedules_that_mean_nothing(period):
    with pytest.raises(ValueError, match="period must be a finite number above 0"):
        bl.schedules.Cyclic(period=period)


def test_ranges_are_named():
    check_number("x", 0.5, above=0, below=1)
    with pytest.raises(ValueError, match=r"x must be a finite number above 0 and below 1\. Got 1"):
        check_number("x", 1, above=0, below=1)
    check_whole("n", 3)
    with pytest.raises(ValueError, match=r"n must be a whole number, at least 2\. Got 1"):
        check_whole("n", 1, least=2)


NETWORK, ROWS = nn.Linear(3, 2).eval(), torch.zeros(2, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, True, "1", None])
def test_tolerances(value, tmp_path):
    """No difference is larger than NaN, so that a check against it would always pass."""
    for verb in (bl.compact, functools.partial(bl.export, path=tmp_path / "net.pt2")):
        with pytest.raises((TypeError, ValueError), match="tolerance must be a finite number at least 0"):
            verb(NETWORK, example=ROWS, tolerance=value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [math.nan, -1, 0, 1, 2.5, True, "a", None, []])
def test_probabilities_and_numbers_of_draws(value):
    bnn = bl.bayesianize(NETWORK, bl.Variational(), likelihood=bl.likelihoods.Gaussian(0.5), num_data=2)
    prediction = bl.predict(bnn, ROWS, samples=2)
    for name, verb in (("q", prediction.quantile), ("mass", prediction.interval)):
        with pytest.raises((TypeError, ValueError), match=f"{name} must be a finite number above 0 and below 1"):
            verb(value)
    with pytest.raises(ValueError, match="samples must be a whole number"):
        bl.log_evidence(bnn, [(ROWS, ROWS[:, :2])], samples=-1 if value == 1 else value)
