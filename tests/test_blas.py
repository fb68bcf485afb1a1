"""Matrix products by BLAS: for networks of matrices alone, with the process's setting as it was afterwards."""

import importlib

import pytest
import torch
from torch import nn

from bayeslim import blas
from oracles import checked_ensemble


@pytest.fixture
def arm(monkeypatch):
    monkeypatch.setattr(blas, "IS_ARM", True)
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before


def test_only_networks_of_matrices_in_full_precision(arm):
    torch.backends.mkldnn.enabled = True
    for model, by_blas in (
        (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), True),
        (nn.Linear(3, 4).double(), True),
        (nn.Linear(3, 4).bfloat16(), False),
        (nn.Sequential(nn.Conv1d(1, 2, 3), nn.Linear(3, 4)), False),
        (nn.LSTM(3, 4), False),
    ):
        with blas.products_of(model):
            assert torch.backends.mkldnn.enabled is not by_blas
        assert torch.backends.mkldnn.enabled is True


def test_the_setting_comes_back_after_an_error_and_stays_off_where_it_was(arm):
    torch.backends.mkldnn.enabled = True
    with pytest.raises(KeyError), blas.by_blas():
        raise KeyError
    assert torch.backends.mkldnn.enabled is True
    torch.backends.mkldnn.enabled = False
    with blas.by_blas():
        pass
    assert torch.backends.mkldnn.enabled is False


def test_elsewhere_nothing_changes(monkeypatch):
    monkeypatch.setattr(blas, "IS_ARM", False)
    before = torch.backends.mkldnn.enabled
    with blas.by_blas():
        assert torch.backends.mkldnn.enabled is before
    with blas.without_onednn():
        assert torch.backends.mkldnn.enabled is False
    assert torch.backends.mkldnn.enabled is before


@pytest.mark.parametrize(
    ("shape", "units", "expected"),
    [((100, 784), 400, True), ((9_000, 784), 400, True), ((100, 28, 64), 64, False), ((16, 28, 64), 64, True),
     ((16, 784), 32, True), ((9_000, 784), 32, False), ((8, 784), 400, False),
     ((16, 2048), 400, False), ((16, 2048), 10, True), ((16, 3072), 400, True), ((300, 4096), 1000, True)],
)  # fmt: skip
def test_many_rows_times_small_or_wide_matrices_and_few_of_others_stay_where_they_are(arm, shape, units, expected):
    torch.backends.mkldnn.enabled = True
    x, weight = torch.empty(shape), torch.empty(units, shape[-1])
    assert blas.is_quicker_by_blas(x, weight) == expected
    torch.backends.mkldnn.enabled = False
    assert not blas.is_quicker_by_blas(x, weight)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"), [(16, 2048, True), (4, 2048, False), (400, 2048, False), (16, 2000, False)]
)
def test_networks_with_layers_of_both_kinds_go_layer_by_layer(arm, rows, columns, expected, monkeypatch):
    model = nn.Sequential(nn.Linear(columns, 300, device="meta"), nn.ReLU(), nn.Linear(300, 300, device="meta"))
    assert blas.is_better_apart(model, rows) == expected
    monkeypatch.setattr(blas, "IS_ARM", False)
    assert not blas.is_better_apart(model, rows)


@pytest.mark.parametrize(("shape", "expected"), [((5, 400, 784), 191), ((2, 400, 784), 0), ((5, 400, 2048), 0)])
def test_features_lie_along_memory_of_few_rows_times_large_weights_that_do_not_compete(shape, expected):
    assert blas.rows_along(torch.empty(shape)) == expected


@pytest.mark.parametrize(
    ("model", "at_once"),
    [(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), False),
     (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), True)],
)  # fmt: skip
def test_networks_that_are_no_chains_are_called_alone_where_rows_compete(arm, model, at_once, monkeypatch):
    predict = importlib.import_module("bayeslim.predict")
    made = []
    make = predict.at_once
    monkeypatch.setattr(predict, "at_once", lambda *args: made.append(make(*args)) or made[-1])
    _, check = checked_ensemble(model, torch.randn(16, 6))
    check()
    assert made
    made.clear()
    monkeypatch.setattr(blas, "COMPETING", 2)
    monkeypatch.setattr(blas, "SEVERAL", 8)
    _, check = checked_ensemble(model, torch.randn(16, 6))
    check()
    assert bool(made) == at_once
