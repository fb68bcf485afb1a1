"""The speed benchmark runs without the peers, on any machine, and its arithmetic is right."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("steps")


def test_measures_and_saves(steps, tmp_path, monkeypatch, capsys):
    options = f"--networks mlp --inputs 3 --seconds 0 --patience 0 --results {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["steps.py", *options.split()])
    steps.main()
    printed = capsys.readouterr().out
    saved = json.loads((tmp_path / "steps.json").read_text())
    assert list(tmp_path.iterdir()) == [tmp_path / "steps.json"]
    assert set(saved["results"]["mlp"]) == {"step", "predict 3"}
    for rows in saved["results"]["mlp"].values():
        assert rows["plain network"]["ratio"] == 1
        assert all(row["ms"] > 0 and row["rounds"] == 1 for row in rows.values())
        assert {"bayeslim shared", "bayeslim local", "bayeslim flipout"} <= set(rows)
    assert saved["environment"]["packages"]["torch"] == torch.__version__
    assert "training step" in printed
    assert "local step / plain step" in printed


def test_everybody_takes_the_same_number_of_turns(steps):
    calls = {"a": 0, "b": 0}

    def action(name):
        calls[name] += 1

    times = steps.take_turns(
        {name: lambda name=name: action(name) for name in calls}, seconds=0.01, calls=3, patience=0
    )
    rounds = len(times["a"])
    assert rounds == len(times["b"]) >= 1
    assert calls == {"a": 4 * rounds, "b": 4 * rounds}  # three that count and one that does not


def test_ratios_are_taken_within_rounds(steps):
    # the machine is three times slower in the second round; the ratio is 2 in each
    rows = steps.summary({steps.PLAIN: [(1, 0), (3, 0), (1, 0)], "other": [(2, 0), (6, 0.5), (2, 0)]})
    assert rows["other"] == {"ms": 2000, "ratio": 2, "ratio_low": 2, "ratio_high": 2, "others": 0.5, "rounds": 3}


def test_goals_compare_with_the_best_peer(steps):
    def row(ratio):
        return {"ratio": ratio}

    names = {steps.PLAIN: row(1), "bayeslim shared": row(1.8), "bayeslim local": row(2.5)}
    results = {"mlp": {"step": {**names, "torchbnn": row(3), "ivon-opt": row(2)}, "predict 9": names}}
    found = {goal["goal"]: (goal["measured"], goal["met"]) for goal in steps.goals(results)}
    assert found == {
        "MLP 784-400-400-10: shared step / best peer's (ivon-opt)": (0.9, False),
        "MLP 784-400-400-10: local step / plain step": (2.5, False),
        "MLP 784-400-400-10: predict 9 inputs, 32 samples / one pass": (1.8, True),
    }


def test_a_disturbed_turn_is_taken_again(steps, monkeypatch):
    quiet = importlib.import_module("quiet")
    used = iter([0.0, 100.0, 100.0, 100.0])  # others are busy in the first turn, not in the second
    monkeypatch.setattr(quiet, "others", lambda: next(used))
    values = iter([9.0, 1.0])
    assert quiet.Patience(10).undisturbed(lambda: next(values)) == (1.0, 0.0)


def test_patience_ends(steps, monkeypatch):
    quiet = importlib.import_module("quiet")
    clock = iter(range(100))
    monkeypatch.setattr(quiet, "others", lambda: 1e6 * next(clock))
    value, used = quiet.Patience(0).undisturbed(lambda: 9.0)
    assert value == 9.0
    assert used > quiet.MAX_CORES_OF_OTHERS


def test_others_leaves_out_our_own_work(steps):
    quiet = importlib.import_module("quiet")
    assert quiet.others() >= 0
