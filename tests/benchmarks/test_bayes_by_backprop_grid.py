"""Stacked networks of the grid learn as single ones do, resume exactly, and become a table."""

from __future__ import annotations

import argparse
import importlib
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal

import bayeslim as bl

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def grid(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("bayes_by_backprop_grid")


def some_data(grid, images=256):
    generator = torch.Generator().manual_seed(0)
    parts = {
        name: (torch.rand(images, 784, generator=generator), torch.randint(10, (images,), generator=generator))
        for name in ("train", "validation", "test")
    }
    steps = images // grid.BATCH
    return grid.Data(parts, torch.zeros(steps, grid.BATCH, dtype=torch.int64), torch.full((steps,), 1e-3))


def test_there_are_324_settings(grid):
    found = [tuple(setting.values()) for samples in grid.GRID["samples"] for setting in grid.settings(samples)]
    assert len(found) == len(set(found)) == 324


def test_gradients_are_those_of_each_network_alone(grid):
    torch.manual_seed(0)
    settings = grid.settings(2)[::30]
    stack = grid.Stack.new(settings, 8, "cpu")
    x, y, share = torch.rand(16, 784), torch.randint(10, (16,)), torch.tensor(0.2)
    noise = {name: torch.randn(len(settings), 2, *mean.shape[1:]) for name, mean in stack.means.items()}
    draws = {n: m.unsqueeze(1) + stack.log_stds[n].exp().unsqueeze(1) * noise[n] for n, m in stack.means.items()}
    found = grid.gradients(stack.means, stack.log_stds, draws, stack.priors(), x, y, share)
    for index, setting in enumerate(settings):
        means, log_stds = (
            {name: value[index].clone().requires_grad_() for name, value in part.items()}
            for part in (stack.means, stack.log_stds)
        )
        sigmas = (math.exp(-setting[f"minus_log_sigma{k}"]) for k in (1, 2))
        prior = bl.priors.ScaleMixture(setting["pi"], *sigmas)
        loss = torch.zeros(())
        for draw in range(2):
            weights = {n: mean + log_stds[n].exp() * noise[n][index, draw] for n, mean in means.items()}
            log_q = sum(Normal(mean, log_stds[n].exp()).log_prob(weights[n]).sum() for n, mean in means.items())
            log_p = sum(prior.log_prob(weight).sum() for weight in weights.values())
            loss = loss + 0.5 * (F.cross_entropy(grid.logits(weights, x), y) + share * (log_q - log_p))
        loss.backward()
        for kind, own in enumerate((means, log_stds)):
            for name, value in own.items():
                torch.testing.assert_close(found[kind][name][index], value.grad, rtol=1e-4, atol=1e-4)


def test_adam_moves_every_network_by_its_own_learning_rate(grid):
    settings = [{**grid.settings(1)[0], "lr": lr} for lr in (1e-3, 1e-5)]
    stack, data = grid.Stack.new(settings, 8, "cpu"), some_data(grid)
    before = {name: mean.clone() for name, mean in stack.means.items()}
    stack.stepper(data, compiled=False)()
    for index, lr in enumerate((1e-3, 1e-5)):  # the first step of Adam is the learning rate's length
        moved = (stack.means["fc2.weight"] - before["fc2.weight"])[index].abs()
        assert float(moved.median()) == pytest.approx(lr, rel=0.1)


def test_an_interrupted_run_resumes_exactly(grid, tmp_path):
    def trained(stops):
        torch.manual_seed(1)
        stacks, data = [grid.Stack.new(grid.settings(k)[:2], 8, "cpu") for k in (1, 2)], some_data(grid)
        if stops == "again":
            grid.resume(stacks, tmp_path)
        steps = [stack.stepper(data, compiled=False) for stack in stacks]
        for part in grid.parts_of(1 if stops == "early" else 2, stacks[0].epochs, 1):
            for stack, step in zip(stacks, steps, strict=True):
                for epoch in part:
                    stack.train(step, epoch, data)
        if stops == "early":
            grid.keep(stacks, tmp_path)
        return stacks

    whole = trained("never")
    trained("early")
    for expected, found in zip(whole, trained("again"), strict=True):
        assert found.epochs == 2
        for name, value in expected.state().items():
            assert torch.equal(value, found.state()[name]), name


def test_results_become_a_table(grid, monkeypatch, tmp_path):
    tables = importlib.import_module("grid_table")
    data = some_data(grid)
    stacks = [grid.Stack.new(grid.settings(k)[:2], 8, "cpu") for k in (1, 2)]
    for stack in stacks:
        stack.train(stack.stepper(data, compiled=False), 0, data)
        stack.measure(data, draws=2)
    options = argparse.Namespace(device="cpu", units=8, draws=2)
    results = {**grid.results(stacks, options), "environment": {"gpu": "GPU"}}
    assert len(results["rows"]) == 4
    results["rows"][0]["validation"]["sample"]["error"] = 1.25
    results["rows"][1]["validation"]["sample"]["error"] = None  # a network that diverged counts as one that guesses
    text = tables.markdown(results)
    assert "| 1 | 1/4 | 0 | 6 | 1e-3 | 1.25 |" in text
    assert tables.means(results["rows"], "samples")[1] == pytest.approx((1.25 + 90) / 2)
    document = tmp_path / "results.md"
    document.write_text(f"before\n{tables.MARKS[0]}old\n{tables.MARKS[1]}\nafter\n")
    monkeypatch.setattr(tables, "DOCUMENT", document)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / f"{grid.NAME}.json").write_text(importlib.import_module("json").dumps(results))
    tables.main()
    assert "old" not in document.read_text()
    assert text in document.read_text()
    assert document.read_text().startswith("before\n")
    assert document.read_text().endswith("\nafter\n")
