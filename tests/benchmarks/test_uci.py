"""The benchmark on UCI sets: splits that learn side by side, a run that resumes, and a table with every method."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bayeslim.app.data.uci import UCI_SETS

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("uci")


def test_one_split_of_many_learns_as_it_does_alone(benchmark: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 60, 3)
    y = x[..., :1] + 0.2 * torch.randn(2, 60, 1)
    for method in ("laplace", "ensemble", "vi"):
        settings = benchmark.Settings(method, epochs=40, batch=30, lr=0.02, draws=1, hidden=8, seed=0)
        both = benchmark.train(x, y, settings)
        alone = benchmark.train(x[:1], y[:1], settings)
        first, second = (found[0](x[0]).mean for found in (both, alone))
        assert float((first - second).abs().mean()) < (0.1 if method == "vi" else 0.01)  # noise of its own
        assert float((both[1](x[1]).mean.cpu() - y[1]).square().mean()) < 0.5 * float(y[1].var())


def test_it_resumes_and_prints_a_table(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(UCI_SETS["yacht"].rows, 6))
    (tmp_path / "uci").mkdir()
    np.savez(tmp_path / "uci" / "yacht.npz", x=x, y=10 * x[:, 0] + random.normal(size=len(x)))
    monkeypatch.setenv("BAYESLIM_DATA", str(tmp_path))
    monkeypatch.setenv("BAYESLIM_PROGRESS", "0")
    methods = ["vi", "renyi-0.5", "laplace", "sghmc", "dropout", "ensemble"]
    words = [
        "--methods",
        *methods,
        "--sets",
        "yacht",
        "--splits",
        "1",
        "--epochs",
        "2",
        "--device",
        "cpu",
        "--results",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["uci.py", *words])
    monkeypatch.setattr(benchmark, "SAMPLES", 2)
    benchmark.main()
    said = capsys.readouterr().out
    runs = json.loads((tmp_path / "uci.json").read_text())["runs"]
    assert len(runs) == len(methods)
    assert all(0 <= run["conformal_coverage"] <= 1 and run["width"] > 0 for run in runs)
    assert all(np.isfinite(run["nll"]) for run in runs)
    assert all(method in said for method in methods)
    monkeypatch.setattr(benchmark, "run", None)  # nothing is left to run
    benchmark.main()
    assert "yacht" in capsys.readouterr().out
