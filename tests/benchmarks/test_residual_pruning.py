"""The benchmark of a residual network trains, cuts by every rule, and goes on where it was."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_it_cuts_by_every_rule_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    benchmark = importlib.import_module("residual_pruning")
    torch.manual_seed(0)
    x, y = torch.rand(300, 1, 16, 16), torch.randint(10, (300,))
    data = SimpleNamespace(train_x=x, train_y=y, test_x=x[:50], test_y=y[:50])
    monkeypatch.setattr(benchmark.bl.data, "load", lambda _: data)
    for setting, value in (("WIDTH", 2), ("STEPS", 2), ("BATCH", 50), ("GOALS", {0.9: 1.0})):
        monkeypatch.setattr(benchmark, setting, value)
    options = f"--half --epochs 1 --images 100 --checkpoint {tmp_path}/net.pt --results {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["residual_pruning.py", *options.split()])
    benchmark.main()
    found = json.loads((tmp_path / "residual_pruning_half.json").read_text())
    assert set(found["error"]) == {f"90%, {rule}" for rule in benchmark.RULES}
    monkeypatch.setattr(benchmark, "cut", lambda *_: pytest.fail("a finished cut was made again"))
    benchmark.main()
    assert capsys.readouterr().out.count("dense:") == 2
    monkeypatch.setattr(sys, "argv", ["residual_pruning.py", *options.replace("--epochs 1", "--epochs 2").split()])
    with pytest.raises(SystemExit, match="trained for 1 epochs"):
        benchmark.main()
