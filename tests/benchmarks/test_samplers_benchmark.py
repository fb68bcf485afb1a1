"""The benchmark of samplers runs, and takes ratios within rounds."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def samplers(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("samplers")


def test_measures_and_saves(samplers, tmp_path, monkeypatch, capsys):
    options = f"--networks mlp --seconds 0 --patience 0 --results {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["samplers.py", *options.split()])
    samplers.main()
    saved = json.loads((tmp_path / "samplers.json").read_text())
    rows = saved["results"]["mlp"]
    in_loss = {name + samplers.IN_LOSS for name in samplers.PROMISED}
    assert set(rows) == {samplers.SGD, *samplers.METHODS, *in_loss}
    assert rows[samplers.SGD]["ratio"] == 1
    assert all(row["ms"] > 0 and row["rounds"] == 1 for row in rows.values())
    assert "sghmc step / SGD step" in capsys.readouterr().out


def test_ratios_are_taken_within_rounds(samplers):
    times = {samplers.SGD: [(2.0, 0.0), (8.0, 0.0)], "a": [(3.0, 0), (12.0, 0)]}
    row = samplers.summary(times)["a"]
    assert (row["ratio"], row["ms"]) == (1.5, 7500)
