"""A second run in the folder of another: what it may keep, and what it must not take for its own."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.app.compress import pipeline
from bayeslim.app.compress.finished import read_finished
from bayeslim.app.compress.job import Job, described, identity
from bayeslim.app.compress.records import load_slim, save_slim

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
DATA = bl.data.Loader(X, (X[:, 0] > 0).long(), batch_size=20, shuffle=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Time in one runtime, briefly, and write a short report."""
    few = functools.partial(bl.benchmark, runtimes=["eager"], rounds=2, batch_sizes=(1,))
    monkeypatch.setattr(pipeline, "benchmark", few)
    monkeypatch.setattr(pipeline, "report", lambda bnn, pruned, slim, path, **_: path.write_text("a report"))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def run(out, sparsity=0.5, **options):
    settings = {"granularity": "unit", "steps": 1, "formats": (), "baseline": False} | options
    return bl.compress(network(), DATA, DATA, budget=bl.Budget(sparsity=sparsity), out=out, **settings)


def done(folder):
    return list(json.loads((folder / "run.json").read_text())["done"])


class FixedView(nn.Module):
    """Its forward takes one size only, so it is compacted to a graph."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.conv(x).relu().view(-1, 16))


def test_a_slim_network_that_is_a_graph_is_read_again(tmp_path):
    x, model = torch.randn(6, 1, 4, 4), FixedView()
    bnn = bl.bayesianize(model, bl.Laplace(structure="diag"), likelihood=bl.likelihoods.Categorical())
    bnn.fit([(x, torch.tensor([0, 1] * 3))])
    slim = bl.compact(bl.prune(bnn, bl.Budget(sparsity=0.5), granularity="unit", example=x), x)
    assert not isinstance(slim, FixedView)
    save_slim(slim, tmp_path / "slim", x)
    torch.testing.assert_close(load_slim(tmp_path / "slim", model)(x), slim(x))


def unfitted(**options):
    method, likelihood = bl.Laplace(structure="diag"), bl.likelihoods.Categorical()
    return bl.bayesianize(network(), method, likelihood=likelihood, **options)


def fitted(scale=1.0):
    bnn = unfitted()
    bnn.fit([(scale * x, y) for x, y in DATA])
    return bnn


def of(bnn):
    return identity(bnn, DATA, DATA, Job(bl.Budget(sparsity=0.5)))


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        (fitted, fitted, set()),
        (fitted, lambda: fitted(scale=5.0), {"posterior"}),
        (unfitted, fitted, {"posterior", "num_data"}),
        (unfitted, lambda: unfitted(num_data=7), {"num_data"}),
        (unfitted, lambda: unfitted(sites="2.weight"), {"sites", "prior"}),
    ],
)
def test_another_posterior_is_another_run(one, other, differs):
    first, second = of(one()), of(other())
    assert {name for name in first if first[name] != second[name]} == differs


def test_the_folder_of_another_posterior_is_refused_and_that_of_the_same_is_not(tmp_path):
    options = {"budget": bl.Budget(sparsity=0.5), "formats": (), "baseline": False, "steps": 1, "out": tmp_path}
    bnn = fitted()
    bl.compress(bnn, DATA, DATA, **options)
    bl.save(bnn, tmp_path / "given")
    bl.compress(bl.load(tmp_path / "given", network()), DATA, DATA, **options)
    with pytest.raises(bl.errors.BayeslimError, match="another run: its posterior"):
        bl.compress(fitted(scale=5.0), DATA, DATA, **options)


def test_other_zeros_are_another_run():
    bnn = fitted()
    cut = bl.prune(bnn, bl.Budget(sparsity=0.5))
    assert of(bnn)["masks"] == "none"
    first = of(cut)["masks"]
    name = next(iter(cut.masks))
    cut.masks = {**cut.masks, name: ~cut.masks[name]}
    assert of(cut)["masks"] != first


def test_a_stage_that_this_run_does_without_is_forgotten(tmp_path):
    run(tmp_path, fine_tune={"epochs": 1, "lr": 0.05}, baseline=True)
    assert {"tuned", "magnitude"} <= set(done(tmp_path))
    found = run(tmp_path)
    assert done(tmp_path) == [stage for stage in pipeline.STAGES if stage not in ("tuned", "magnitude")]
    assert not (tmp_path / "tuned").exists()
    again = read_finished(tmp_path, network(), described(DATA))
    for name, weight in found.pruned.mean_network().named_parameters():
        assert torch.equal(weight, again.pruned.mean_network().get_parameter(name))


def test_results_that_stand_before_a_stage_that_is_left_out_are_kept(tmp_path, monkeypatch):
    run(tmp_path, fine_tune={"epochs": 1})
    monkeypatch.setattr(pipeline, "prune", None)
    run(tmp_path)
    assert "pruned" in done(tmp_path)


def test_a_user_s_own_folder_is_left_alone(tmp_path):
    (tmp_path / "tuned").mkdir()
    run(tmp_path)
    assert (tmp_path / "tuned").exists()


def test_exported_files_of_another_cut_are_removed(tmp_path):
    run(tmp_path)
    stale = [tmp_path / f"slim.{suffix}" for suffix in ("onnx", "pt2", "c", "h")]
    for file in stale:
        file.write_text("of the first cut")
    run(tmp_path)
    assert all(file.exists() for file in stale), "the same cut"
    run(tmp_path, sparsity=0.7)
    assert not any(file.exists() for file in stale)


def test_another_example_is_another_cut(tmp_path, monkeypatch):
    run(tmp_path, example=X[:2])
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "prune", None)
        run(tmp_path, example=X[2:4])
        with pytest.raises(TypeError, match="not callable"):
            run(tmp_path, example=X[:3])
    run(tmp_path, example=X[:3])
    settings = json.loads((tmp_path / "run.json").read_text())["done"]["pruned"]["settings"]
    assert settings["example"] == "torch.float32 (3, 4)"
