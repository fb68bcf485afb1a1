"""The benchmark of sparse ensembles: two quick members on the digits, measured as one graph."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    shared = importlib.import_module("sparse_posteriors")
    monkeypatch.setattr(shared, "VALIDATION_IMAGES", 1000)
    monkeypatch.setattr(shared, "_scale", lambda name, images: lambda x: x)
    monkeypatch.setitem(shared.NETWORKS, "lenet_300_100", {"name": "lenet_300_100", "inputs": 64})
    module = importlib.import_module("five_for_one")
    monkeypatch.setattr(module, "settings", lambda network: {"data": "digits", "batch": 100, "lr": 1e-2})
    monkeypatch.setattr(module, "others_of", lambda steps: {"dark": steps.test[0][:50] * 0.1})
    # an export takes seconds, and has tests of its own
    monkeypatch.setattr(module.bl, "export", lambda members, *rest, **options: argparse.Namespace(bytes=len(members)))
    return module


def test_members_are_trained_saved_and_measured_together(benchmark, tmp_path) -> None:
    quick = dict.fromkeys(("epochs", "dense_epochs", "tune_epochs"), 3)
    jobs = [
        {"network": "lenet_300_100", "seed": seed, **quick, "device": "cpu", "runs": str(tmp_path)} for seed in (0, 1)
    ]
    found = [benchmark.member(job) for job in jobs]
    rows = benchmark.measured(0, jobs)
    assert [row["row"] for row in rows] == ["one dense", "one sparse", "five dense", "five sparse"]
    one, sparse, both, both_sparse = rows
    assert one["error"] == pytest.approx(found[0]["dense"]["test"], abs=1e-3)
    assert sparse["error"] == pytest.approx(found[0]["sparse"]["test"], abs=1e-3)
    assert both_sparse["nonzeros"] == sum(result["left"] for result in found)
    assert (one["bytes"], both["bytes"]) == (1, 2)  # a file for each ensemble
    assert {"nll", "ece", "auroc dark"} < set(one)
