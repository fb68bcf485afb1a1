"""The benchmark of variance networks, model reduction and relevance: one quick run of each part on the digits."""

from __future__ import annotations

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
    module = importlib.import_module("paper_methods")
    monkeypatch.setattr(module, "MNIST", {"data": "digits", "tune_epochs": 1, "dense_epochs": 1, "batch": 100})
    monkeypatch.setattr(module, "SPARSITIES", (0.5,))
    monkeypatch.setattr(module, "SHARING", ("network", "weight"))
    monkeypatch.setattr(module, "DRAWS", 4)
    # the tracing of a compaction takes seconds, and has tests of its own
    monkeypatch.setattr(module.bl, "compact", lambda pruned, *rest, **options: pruned.mean_network())
    return module


JOB = {"network": "lenet_300_100", "seed": 0, "epochs": 1, "device": "cpu"}


@pytest.mark.filterwarnings("ignore:Standard deviations were still moving")
def test_every_part_has_its_rows(benchmark) -> None:
    rows = {part: benchmark.run(JOB | {"part": part})["rows"] for part in benchmark.PARTS}
    assert [row["row"] for row in rows["reduction"]] == [
        "dense", "signal to noise", "bmrs", "bmrs_uniform", "bottleneck",
    ]  # fmt: skip
    variances = rows["variance"][0]
    assert variances["mean"]["error"] > 80
    assert {"1 draws", "4 draws"} < set(variances)
    assert [row["row"] for row in rows["relevance"]][:3] == [
        "per network, opd", "per network, magnitude", "Kronecker, joint, curvature",
    ]  # fmt: skip
    assert {"dense", "50 %"} < set(rows["relevance"][-1])


def test_no_job_starts_late(benchmark) -> None:
    jobs = importlib.import_module("jobs")
    started: list[int] = []
    assert jobs._in_time(lambda job: started.append(1) or job, 0.0, {}) is None
    assert jobs._in_time(lambda job: started.append(1) or job, None, {"a": 1}) == {"a": 1}
    assert len(started) == 1
