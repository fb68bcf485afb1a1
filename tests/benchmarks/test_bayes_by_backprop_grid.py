"""Stacked networks of the grid learn as single ones do, are saved and gone on with, and become a table."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from pathlib import Path

import pytest
import torch

import bayeslim as bl

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def grid(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("bayes_by_backprop_grid")


@pytest.fixture
def digits(grid, monkeypatch):
    """Images of four classes, which are easy to tell apart."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (1024,), generator=generator)
    x = 0.1 * torch.rand(1024, 1, 28, 28, generator=generator)
    for k in range(4):
        x[y == k, :, 7 * k : 7 * k + 7] += 0.5
    parts = {"train": (x[:512], y[:512]), "validation": (x[512:768], y[512:768]), "test": (x[768:], y[768:])}
    monkeypatch.setattr(grid, "data", lambda device, images: parts)
    return parts


def test_there_are_324_settings_in_stacks_of_one_method_and_rate(grid):
    stacks = grid.stacks()
    found = [tuple(setting.values()) for own in stacks.values() for setting in own]
    assert len(found) == len(set(found)) == 324
    for own in stacks.values():
        assert len({(setting["samples"], setting["lr"]) for setting in own}) == 1


def test_networks_of_a_stack_learn_as_those_trained_alone(grid, digits):
    own = [grid.stacks()["2 samples, lr 0.001"][k] for k in (13, 26)]
    options = {"epochs": 20, "lr": 3e-3, "progress": False}
    loader = bl.data.Loader(*digits["train"], batch_size=128, drop_last=True)
    together = [grid.network(setting, 8) for setting in own for _ in range(4)]
    assert all(torch.equal(together[0].model.fc1.weight, bnn.model.fc1.weight) for bnn in together)
    bl.fit_together(together, loader, **options, seed=0)

    def summary(networks):
        nlls = [grid.scores(bnn.eval(), *digits["test"], 16)["sample"]["nll"] for bnn in networks]
        variances = [torch.cat([v.flatten() for v in bnn.posterior_.variance.values()]) for bnn in networks]
        return statistics.mean(nlls), float(torch.stack(variances).log().mean())

    widths = []
    for place, setting in enumerate(own):
        alone = [grid.network(setting, 8) for _ in range(3)]
        for seed, bnn in enumerate(alone):
            bnn.fit(loader, **options, seed=seed)
        (nll, width), (other_nll, other_width) = summary(together[4 * place : 4 * place + 4]), summary(alone)
        assert nll == pytest.approx(other_nll, abs=0.03)
        assert width == pytest.approx(other_width, abs=0.01)
        widths.append(width)
    assert abs(widths[0] - widths[1]) > 0.02  # so each network has the prior of its own setting


def test_a_run_goes_on_with_what_is_missing_and_becomes_a_table(grid, digits, monkeypatch, tmp_path, capsys):
    def run(*options):
        case = ["--units", "8", "--networks", "2", "--epochs", "1", "--draws", "2"]
        folders = ["--results", str(tmp_path), "--earlier", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["grid", *case, *folders, *options])
        grid.main()
        return json.loads((tmp_path / f"{grid.NAME}.json").read_text())

    first = run("--only", "1 samples, lr 0.001")
    assert list(first["stacks"]) == ["1 samples, lr 0.001"]
    capsys.readouterr()
    results = run("--only", "1 samples")
    assert results["stacks"]["1 samples, lr 0.001"] == first["stacks"]["1 samples, lr 0.001"]
    assert "lr 0.001:" not in capsys.readouterr().out
    assert len(results["stacks"]) == 3
    run("--only", "2 samples", "--minutes", "0")
    assert "and 0 s are left" in capsys.readouterr().out.replace("-0", "0")
    tables = importlib.import_module("writers.grid")
    rows = results["stacks"]["1 samples, lr 0.0001"]["rows"]
    rows[0]["validation"]["sample"]["error"] = -1.25
    text = tables.markdown(results)
    assert "6 networks, 1 epochs each" in text
    assert "| 1 | 1/4 | 0 | 6 | 1e-4 | -1.25 |" in text
    assert "The run ended before these settings were trained: 2 samples, lr 0.001;" in text
