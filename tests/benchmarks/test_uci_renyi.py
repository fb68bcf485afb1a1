"""The benchmark that trains many draws and splits at once has the library's own loss, and goes on where it stopped."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.families import diagonal

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("uci_renyi")


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_its_loss_is_the_librarys(benchmark, monkeypatch, alpha):
    draws, splits = 3, 2
    networks = benchmark.Networks(4, range(splits))
    x, y, noise = torch.randn(splits, 7, 4), torch.randn(splits, 7, 1), networks.noise(draws)
    assert all(p.is_contiguous() for p in networks.parameters())  # a fused Adam writes beside views
    losses = networks.losses(x, y, noise, 90, alpha)
    losses.sum().backward()
    for split in range(splits):
        model = nn.Sequential(nn.Linear(4, benchmark.HIDDEN), nn.ReLU(), nn.Linear(benchmark.HIDDEN, 1))
        # α = 1 from the densities of draws too, in the limit
        start = bl.families.DiagonalGaussian(math.exp(benchmark.INITIAL_LOG_VARIANCE / 2))
        method = bl.Variational(start, renyi=alpha - 1e-7 * (alpha == 1), samples=draws)
        likelihood = bl.likelihoods.Gaussian("learned", initial_noise=benchmark.INITIAL_NOISE)
        bnn = bl.bayesianize(model, method, likelihood=likelihood, sites="all", num_data=90)
        (first, last) = (m.detach()[split] for m in networks.means)
        own = {"0.weight": first[:-1].T, "0.bias": first[-1], "2.weight": last[None, :-1], "2.bias": last[-1:]}
        for name, value in own.items():
            bnn.model.get_parameter(name).data.copy_(value)
        given = [
            {
                "0.weight": noise[0][split, :-1, k].T,
                "0.bias": noise[0][split, -1, k],
                "2.weight": noise[1][split, k, :-1][None],
                "2.bias": noise[1][split, k, -1:],
            }
            for k in range(draws)
        ]
        with monkeypatch.context() as patch:
            patch.setattr(diagonal, "standard_normals_like", lambda *_, left=given: left.pop(0))
            loss = bnn.loss((x[split], y[split]))
        loss.backward()
        torch.testing.assert_close(losses[split], loss, rtol=1e-4, atol=0)
        torch.testing.assert_close(networks.means[0].grad[split, :-1].T, bnn.model[0].weight.grad, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(
            networks.log_noise.grad[split, 0, 0], bnn.likelihood.log_noise.grad, rtol=1e-2, atol=1e-3
        )


def test_runs_summarises_and_goes_on(benchmark, tmp_path, monkeypatch, capsys):
    random = np.random.default_rng(0)
    (tmp_path / "uci").mkdir()
    x = random.normal(size=(308, 6))
    np.savez(tmp_path / "uci" / "yacht.npz", x=x, y=x[:, 0] + 0.1 * random.normal(size=308))
    monkeypatch.setenv("BAYESLIM_DATA", str(tmp_path))
    results = tmp_path / "results"
    for splits in (1, 2):
        options = f"--sets yacht --alphas 1 --splits {splits} --epochs 3 --draws 2 --results {results}"
        monkeypatch.setattr(sys, "argv", ["uci_renyi.py", *options.split()])
        benchmark.main()
    saved = json.loads((results / "uci_renyi.json").read_text())
    assert [run["split"] for run in saved["runs"]] == [0, 1]
    cell = saved["summary"]["yacht"]["1"]
    assert cell["splits"] == 2
    assert cell["nll"][0] == pytest.approx(sum(run["nll"] for run in saved["runs"]) / 2)
    assert cell["published"]["nll"] == [1.77, 0.01]
    assert "yacht" in capsys.readouterr().out
