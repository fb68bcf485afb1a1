"""The benchmark suite runs on a small case, resumes, and becomes a table and a plot."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from torch import nn

import bayeslim as bl

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("suite")


@pytest.fixture
def command(suite, monkeypatch):
    """Run `python -m benchmarks` with options, in this process."""
    spec = importlib.util.spec_from_file_location("benchmarks_main", FOLDER / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, options)])
        module.main()

    return run


CASE = (
    "--small", "--networks", "mlp", "--growth", "width", "--contenders", "Variational, shared noise", "SGLD",
    "--minutes", "0.001",
)  # fmt: skip


def test_parts_are_saved_continued_and_reported(command, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    results, pictures = tmp_path / "results", tmp_path / "pictures"
    command(*CASE, "--results", results, "--pictures", pictures)  # a thousandth of a minute is enough for one part
    assert len(json.loads((results / "suite_cpu.json").read_text())["parts"]) == 1
    assert not pictures.exists()
    for _ in range(4):
        command(*CASE, "--results", results, "--pictures", pictures, "--minutes", "0.02")
    saved = json.loads((results / "suite_cpu.json").read_text())
    assert set(saved["parts"]) == {"growth width", "mlp steps", "mlp predictions", "mlp fits", "mlp memory"}
    assert "growth width: done before" in capsys.readouterr().out
    for part in ("steps", "predictions", "fits", "memory"):
        rows = saved["parts"][f"mlp {part}"]
        assert rows["plain network"]["ratio"] == 1
        assert all(rows[name]["ratio"] > 0 for name in ("Variational, shared noise", "SGLD"))
        assert set(rows) == {"plain network", "Variational, shared noise", "SGLD"}
    text = importlib.import_module("writers.suite").markdown(saved, "suite_cpu")
    ratio = saved["parts"]["mlp memory"]["SGLD"]["ratio"]
    assert "| SGLD |" in text
    assert f"| {ratio:.2f} |" in text
    assert "a step, hidden units of each layer" in text
    assert (pictures / "suite_cpu.svg").stat().st_size > 1000
    command(*CASE, "--results", results, "--pictures", pictures, "--contenders", "SGLD", "--no-report")
    again = json.loads((results / "suite_cpu.json").read_text())["parts"]
    assert set(again) == {"growth width"}  # other settings begin anew


@pytest.mark.filterwarnings("ignore::bayeslim.errors.BayeslimWarning")
def test_a_contender_that_fails_is_reported_with_the_reason(suite, monkeypatch):
    def broken(features):
        raise RuntimeError("no such layer\nand a long story")

    entry = suite.Entry(suite.METHODS["SGLD"].method, needs=broken)
    monkeypatch.setattr(suite, "METHODS", {"broken": entry, "SGLD": suite.METHODS["SGLD"]})
    problem = suite.Problem.of(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), "cpu", 4, 128)
    for part in ("steps", "predictions", "fits", "memory"):
        rows = getattr(problem, part)(0.0, ["broken", "SGLD"])
        assert rows["broken"] == {"failed": "RuntimeError: no such layer"}, part
        assert rows["SGLD"].get("ratio", 0) > 0, rows


@pytest.mark.filterwarnings("ignore::bayeslim.errors.BayeslimWarning")
def test_memory_counts_weights_gradients_and_moments(suite):
    layer = nn.Linear(784, 1000)
    problem = suite.Problem.of(nn.Sequential(nn.Flatten(), layer), "cpu", 4, 128)
    found = problem.memory(0.0, ["SGLD"])
    weights = 4e-6 * sum(p.numel() for p in layer.parameters())
    assert 4 * weights < found["plain network"]["mb"] < 6 * weights


def test_exponents(suite):
    growth = importlib.import_module("growth")
    sizes = (100, 200, 400)
    assert growth.slope(sizes, [1e-6 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert set(growth.SIZES) == set(growth.SMALL_SIZES) == set(growth.TITLES)


def test_every_method_of_the_library_is_in_the_suite(suite):
    methods = {
        name for name in bl.__all__ if isinstance(cls := getattr(bl, name), type) and issubclass(cls, bl.Method)
    } - {"Method"}
    assert methods == {type(entry.method()).__name__ for entry in suite.METHODS.values()}
