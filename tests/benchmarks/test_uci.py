"""The benchmark on UCI sets: losses of the library, a run that resumes, and a table with every method."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.app.data.uci import UCI_SETS

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("uci")


def network_of(stack: Any, split: int) -> nn.Module:
    W, v = (m[split].detach() for m in stack.means)
    model = nn.Sequential(nn.Linear(W.shape[0] - 1, W.shape[-1]), nn.ReLU(), nn.Linear(W.shape[-1], 1))
    own = {"0.weight": W[:-1, 0].T, "0.bias": W[-1, 0], "2.weight": v[:, :-1], "2.bias": v[:, -1].flatten()}
    with torch.no_grad():
        for name, value in own.items():
            model.get_parameter(name).copy_(value)
    return model


def test_its_map_loss_has_the_gradients_of_the_library(benchmark: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 30, 4), torch.randn(2, 30, 1)
    stack = benchmark.Stack(x, y, 5, 1, False, 0)
    rows = torch.arange(8).expand(2, -1)
    stack.loss("laplace", rows, 1).backward()
    for split in range(2):
        likelihood = bl.likelihoods.Gaussian("learned", initial_noise=1.0)
        bnn = bl.bayesianize(network_of(stack, split), bl.Laplace(), likelihood=likelihood, num_data=30)
        bnn.loss((x[split, :8], y[split, :8])).backward()
        torch.testing.assert_close(stack.means[0].grad[split, :-1, 0].T, bnn.model[0].weight.grad)
        torch.testing.assert_close(stack.means[1].grad[split, 0, :-1], bnn.model[2].weight.grad[0])
        torch.testing.assert_close(stack.log_noise.grad[split].flatten(), bnn.likelihood.log_noise.grad[None])


def test_its_kl_is_that_of_gaussians(benchmark: Any) -> None:
    torch.manual_seed(0)
    stack = benchmark.Stack(torch.randn(1, 20, 3), torch.randn(1, 20, 1), 4, 1, True, 0)
    for t in stack.log_variances:
        t.data.normal_(-2)
    found = [
        torch.distributions.Normal(m, (t / 2).exp()) for m, t in zip(stack.means, stack.log_variances, strict=True)
    ]
    unit = torch.distributions.Normal(0.0, 1.0)
    kl = sum(torch.distributions.kl_divergence(q, unit).sum() for q in found)
    rows = torch.arange(20)[None]
    torch.manual_seed(1)
    drawn, _ = stack.draw(7)
    data = stack.log_likelihoods(stack.outputs(stack.x, drawn), stack.y).mean()
    torch.manual_seed(1)
    torch.testing.assert_close(stack.loss("vi", rows, 7), kl / 20 - data)


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
