"""The baselines of the language-model benchmark do what their papers say, on small cases, and the benchmark runs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def baselines(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("one_shot_baselines")


def problem(inputs=24, outputs=10, rows=200):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64)
    mixing = torch.logspace(0, -2, inputs, dtype=torch.float64)[:, None] * mixing  # correlated, as activations are
    x = torch.randn(rows, inputs, generator=generator, dtype=torch.float64) @ mixing
    return torch.randn(outputs, inputs, generator=generator, dtype=torch.float64), x, x.T @ x


def error(x, weight, cut):
    return float((x @ (weight - cut).T).square().sum())


def test_each_rule_leaves_less_error_than_the_one_before(baselines):
    weight, x, hessian = problem()
    for target in (baselines.Target(0.5), baselines.Target(0.5, 2, 4)):
        found = {name: cut(weight, hessian, target) for name, cut in baselines.BASELINES.items()}
        errors = {name: error(x, weight, cut) for name, cut in found.items()}
        assert errors["sparsegpt"] < 0.7 * min(errors["magnitude"], errors["wanda"])
        assert errors["row"] < errors["sparsegpt"]
        for name, cut in found.items():
            assert float((cut == 0).double().mean()) == pytest.approx(0.5), name
            if target.m:
                assert bool(((cut != 0).unflatten(1, (-1, 4)).sum(-1) == 2).all()), name
        assert bool(((found["wanda"] == 0).sum(1) == 12).all())


def test_wanda_is_magnitude_by_rows_for_inputs_of_equal_norms(baselines):
    weight, *_ = problem()
    found = baselines.wanda(weight, torch.eye(24, dtype=torch.float64), baselines.Target(0.5))
    smallest = weight.abs().argsort(1)[:, :12]
    assert torch.equal(found, weight.scatter(1, smallest, 0.0))


def test_rows_are_solved_exactly(baselines):
    weight, x, hessian = problem()
    gone = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    found = baselines.solved_rows(weight, hessian, gone)
    for w, row, cut in zip(weight, found, gone, strict=True):
        wanted = torch.linalg.lstsq(x[:, ~cut], (x @ w)[:, None], driver="gelsd").solution[:, 0]
        torch.testing.assert_close(row[~cut], wanted, rtol=1e-6, atol=1e-8)
        assert not bool(row[cut].any())


def test_sparsegpt_of_one_column_at_the_end_is_optimal(baselines):
    """With only the first column cut, the others go to their least-squares place (up to the damping)."""
    weight, _, hessian = problem(inputs=8)
    weight[:, 0] *= 1e-9
    weight[:, 0] += 1e-3  # by far the cheapest
    found = baselines.sparsegpt(weight, hessian, baselines.Target(1 / 8))
    gone = torch.zeros_like(weight, dtype=torch.bool)
    gone[:, 0] = True
    assert torch.equal(found == 0, gone)
    damped = baselines.damped(hessian)
    torch.testing.assert_close(found, baselines.solved_rows(weight, damped, gone), rtol=1e-6, atol=1e-9)


def test_the_benchmark_runs_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    benchmark = importlib.import_module("language_models")
    byte_gpt = importlib.import_module("byte_gpt")
    tiny = byte_gpt.Shape(blocks=1, width=16, heads=2, context=16)
    monkeypatch.setattr(benchmark, "Shape", lambda **_: tiny)
    monkeypatch.setattr(benchmark, "python_source", lambda _: (torch.arange(4000).to(torch.uint8),) * 2)
    options = (
        f"--small --train-steps 3 --checkpoint {tmp_path}/net.pt --results {tmp_path}/out.json --targets 2:4 --rules"
    )
    for rules in (["sparsegpt"], ["sparsegpt", "bayeslim x1"]):
        monkeypatch.setattr(sys, "argv", ["language_models.py", *options.split(), *rules])
        benchmark.main()
        cells = json.loads((tmp_path / "out.json").read_text())["cells"]
        assert set(cells) == {f"{rule} | 2:4 | seed 0" for rule in rules}
        assert all("log_perplexity" in cell for cell in cells.values()), cells
    assert capsys.readouterr().out.count("sparsegpt | 2:4") == 1
