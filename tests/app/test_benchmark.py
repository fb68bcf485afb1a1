"""Dense against slim: the numbers are the right ones, and ratios come from the same round."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.app.benchmark import Benchmark, Size
from bayeslim.errors import MissingExtra, ShapeMismatch
from bayeslim.export import onnx as exporter
from bayeslim.export.c.library import find_compiler

COMPILED = ("C",) if find_compiler() else ()

X = torch.randn(3, 20)


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 5))


def size(scale: int) -> Size:
    return Size(40 * scale, 20 * scale, 4000 * scale, 2000 * scale, 8000 * scale, {})


def timed(**seconds: tuple[float, ...]) -> Benchmark:
    table = {(*key.split("_"), 1): values for key, values in seconds.items()}
    return Benchmark({"dense": size(10), "slim": size(1)}, table, {})


@pytest.fixture(scope="module")
def measured() -> Benchmark:
    return bl.benchmark(mlp(400), mlp(20), example=X, batch_sizes=(1, 32), rounds=3)


def test_all_runtimes_and_sizes_are_there(measured):
    assert measured.runtimes == ("eager", "onnxruntime", "onnxruntime-int8", *COMPILED)
    assert measured.batch_sizes == (1, 32)
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in measured.seconds.values())
    assert len(measured.seconds) == 4 * len(measured.runtimes)
    dense, slim = measured.sizes["dense"], measured.sizes["slim"]
    assert (dense.parameters, slim.parameters) == (20 * 400 + 400 + 400 * 5 + 5, 20 * 20 + 20 + 20 * 5 + 5)
    assert slim.flops == 2 * (20 * 20 + 20 * 5)
    assert slim.nonzeros == slim.parameters
    assert slim.peak_bytes == 4 * (slim.parameters + 32 * 40)
    for bytes_of in (slim.folder_bytes, slim.file_bytes["onnxruntime"]):
        assert 4 * slim.parameters < bytes_of < 4 * slim.parameters + 3000
    assert dense.file_bytes["onnxruntime-int8"] < 0.4 * dense.file_bytes["onnxruntime"]
    assert not measured.skipped


def test_the_table_and_the_json_say_the_same(measured, tmp_path):
    text = repr(measured)
    for words in ("parameters", "10,405", "525", "peak memory", "onnxruntime-int8, batch 32", "µs", "to dense eager"):
        assert words in text
    content = json.loads(measured.to_json(tmp_path / "b.json"))
    assert content == json.loads((tmp_path / "b.json").read_text())
    assert content["sizes"]["slim"]["parameters"] == 525
    assert len(content["timings"]) == 4 * len(measured.runtimes)
    assert len(content["speedups"]) == 2 * len(measured.runtimes)
    assert content["environment"]["torch"] == torch.__version__


def test_a_speedup_is_the_median_of_ratios_within_rounds():
    """The second round was slow for everybody: the ratio does not care, a ratio of medians of unpaired times would."""
    result = timed(dense_eager=(4.0, 40.0, 6.0), slim_eager=(2.0, 10.0, 1.0))
    ratio = result.speedup("eager", 1)
    assert ratio.median == 4.0
    assert (ratio.low, ratio.high) == (3.0, 5.0)
    assert repr(ratio) == "4x (3-5)"
    assert result.latency("slim", "eager", 1) == 2.0


def test_runtimes_can_be_compared():
    result = timed(
        dense_eager=(8.0, 8.0), slim_eager=(4.0, 4.0), dense_onnxruntime=(2.0, 2.0), slim_onnxruntime=(1.0, 1.0)
    )
    assert result.speedup("onnxruntime", 1).median == 2.0
    assert result.speedup("onnxruntime", 1, against="eager").median == 8.0
    with pytest.raises(KeyError, match=r"There are eager, onnxruntime with batches of 1"):
        result.speedup("compile", 1)


def test_a_runtime_that_does_not_take_a_network_is_left_out(monkeypatch):
    def fails(*_):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(exporter, "traced", fails)
    result = bl.benchmark(mlp(8), mlp(4), example=X, batch_sizes=(1,), rounds=2)
    assert result.runtimes == ("eager", *COMPILED)
    assert "onnxruntime-int8 was left out: no such operator" in repr(result)
    with pytest.raises(RuntimeError, match="no such operator"):
        bl.benchmark(mlp(8), mlp(4), example=X, runtimes=("eager", "onnxruntime-int8"), rounds=2)


def test_without_onnxruntime_there_is_still_eager_and_compile(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda network, **_: compiled.append(network) or network)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    network = mlp(8).train()
    result = bl.benchmark(network, mlp(4), example=X, batch_sizes=(2,), runtimes=("eager", "compile"), rounds=2)
    assert result.runtimes == ("eager", "compile")
    assert len(compiled) == 2
    assert network.training
    with pytest.raises(MissingExtra):
        bl.benchmark(mlp(8), mlp(4), example=X, runtimes=("eager", "onnxruntime"), rounds=2)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"batch_sizes": ()}, ValueError, "batch_sizes"),
        ({"batch_sizes": (1, 0)}, ValueError, "batch_sizes"),
        ({"rounds": 1}, ValueError, "at least 2"),
        ({"runtimes": "eager"}, ValueError, "several of"),
        ({"runtimes": ("onnxruntime",)}, ValueError, '"eager" among them'),
        ({"runtimes": ("eager", "tensorrt")}, ValueError, "several of"),
        ({"example": torch.randn(2, 7)}, ShapeMismatch, "does not run on the example"),
    ],
)
def test_what_cannot_be_measured(options, error, match):
    with pytest.raises(error, match=match):
        bl.benchmark(mlp(8), mlp(4), **({"example": X} | options))


def test_of_a_bayesian_network_the_mean_network_counts():
    bnn = bl.bayesianize(mlp(8), bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=10)
    found = bl.benchmark(bnn, mlp(8), example=X, batch_sizes=(1,), runtimes=("eager",), rounds=2)
    assert found.sizes["dense"].parameters == found.sizes["slim"].parameters
