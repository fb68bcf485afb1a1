"""The whole job: what it gives, that it resumes after a kill, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim.app.compress import baseline, notes, pipeline
from bayeslim.app.compress.folder import RunFolder
from bayeslim.errors import BayeslimError
from bayeslim.io.lock import LOCK_FILE, locked
from processes import exit_code_of


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 8, generator=generator)
    y = x[:, :3].argmax(1)
    return bl.data.Loader(x[:160], y[:160], batch_size=40), bl.data.Loader(x[160:], y[160:], 80, shuffle=False)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3))


@functools.cache
def trained():
    model, (train, _) = network(), data()
    bnn = bl.bayesianize(model, bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    bnn.fit(train, epochs=15, lr=0.02, seed=0)
    return bnn.mean_network()


BUDGET = bl.Budget(sparsity=0.6, empty_layers="keep best")


def brief_report(bnn, pruned, slim, path, **options):
    path.write_text("a report")
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Time in one runtime, briefly, and write a short report."""
    few = functools.partial(bl.benchmark, runtimes=["eager"], rounds=2, batch_sizes=(1,))
    monkeypatch.setattr(pipeline, "benchmark", few)
    monkeypatch.setattr(pipeline, "report", brief_report)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAYESLIM_PROGRESS", "0")
        patch.setattr(pipeline, "report", brief_report)
        patch.setattr(pipeline, "benchmark", functools.partial(bl.benchmark, runtimes=["eager"], rounds=2))
        return run(tmp_path_factory.mktemp("finished")).folder


def run(out, model=None, **options):
    train, val = data()
    settings = {"budget": BUDGET, "steps": 1, "formats": (), "out": out} | options
    return bl.compress(trained() if model is None else model, train, val, **settings)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_everything_is_there_and_says_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "report", bl.report)
    before = weights(trained())
    found = run(tmp_path / "run", granularity="unit", steps=2, formats=("onnx", "pt2"))
    assert same(before, weights(trained())), "the network given is not changed"
    names = {path.name for path in found.files}
    assert names == {"slim", "slim.onnx", "slim.pt2", "benchmark.json", "report.html"}
    assert all(path.exists() for path in found.files)
    assert list(found.rows) == ["dense", "magnitude", "bayeslim"]
    assert found.plan.sparsity >= 0.6
    assert sum(p.numel() for p in found.slim.parameters()) == found.rows["bayeslim"].cost.parameters
    assert found.rows["bayeslim"].cost.parameters < found.rows["dense"].cost.parameters
    x = torch.randn(5, 8)
    masked = found.pruned.mean_network().eval()
    assert torch.allclose(masked(x), found.slim(x), atol=1e-5)
    assert torch.allclose(bl.load(tmp_path / "run" / "slim")(x), found.slim(x), atol=1e-6)
    _, val = data()
    wrong = sum(int((found.slim(x).argmax(-1) != y).sum()) for x, y in val)
    assert found.rows["bayeslim"].scores.error == pytest.approx(wrong / 80)
    assert "bayeslim" in repr(found)
    assert "report.html" in repr(found)


def test_magnitude_is_the_same_budget_without_conditioning(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    found = run(tmp_path)
    dense, slim = trained(), bl.load(tmp_path / "magnitude")
    flat = torch.cat([p.detach().abs().flatten() for n, p in dense.named_parameters() if n.endswith("weight")])
    cutoff = flat.kthvalue(round(0.6 * len(flat))).values
    masked = network()
    masked.load_state_dict(dense.state_dict())
    with torch.no_grad():
        for name, p in masked.named_parameters():
            if name.endswith("weight"):
                p[p.abs() <= cutoff] = 0
    x = torch.randn(6, 8)
    assert torch.allclose(masked(x), slim(x), atol=1e-5)
    assert found.rows["magnitude"].cost.nonzeros <= found.rows["dense"].cost.nonzeros


class Stop(BaseException):
    """A kill."""


STAGES = ["prune", "compact", "by_magnitude", "benchmark", "measure_rows", "report"]


def test_a_run_that_is_stopped_anywhere_goes_on_and_repeats_nothing(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole")
    calls = []
    originals = {name: getattr(pipeline, name) for name in STAGES}

    def watched(name, stop):
        def call(*args, **kwargs):
            calls.append(name)
            if stop:
                raise Stop
            return originals[name](*args, **kwargs)

        return call

    for place, stopped in enumerate(STAGES):
        calls.clear()
        for name in STAGES:
            monkeypatch.setattr(pipeline, name, watched(name, stop=name == stopped))
        with pytest.raises(Stop):
            run(tmp_path / "stopped")
        assert calls == ([stopped] if place == 0 else [STAGES[place - 1], stopped]), "only what was not complete"
    for name in STAGES:
        monkeypatch.setattr(pipeline, name, watched(name, stop=False))
    calls.clear()
    resumed = run(tmp_path / "stopped")
    assert calls == ["report"]
    assert same(weights(whole.slim), weights(resumed.slim))
    assert resumed.plan == whole.plan
    assert resumed.rows["bayeslim"].scores.nll == pytest.approx(whole.rows["bayeslim"].scores.nll, rel=1e-5)
    calls.clear()
    again = run(tmp_path / "stopped")
    assert calls == []
    assert again.rows["dense"].cells() == resumed.rows["dense"].cells()
    assert not list((tmp_path / "stopped").glob("*.tmp"))


def test_another_budget_keeps_the_fit_and_redoes_the_rest(tmp_path, monkeypatch):
    first = run(tmp_path, fine_tune={"epochs": 1}, baseline=False)
    made = []
    original = RunFolder.stage

    def stage(self, name, settings, make, save, load):
        return original(self, name, settings, lambda place: made.append(name) or make(place), save, load)

    monkeypatch.setattr(RunFolder, "stage", stage)
    assert same(weights(run(tmp_path, fine_tune={"epochs": 1}, baseline=False).slim), weights(first.slim))
    assert made == []
    second = run(tmp_path, budget=bl.Budget(sparsity=0.3), fine_tune={"epochs": 1}, baseline=False)
    assert second.plan.sparsity == pytest.approx(0.3, abs=0.01)
    assert "fitted" not in made
    assert made[0] == "pruned"
    assert made[-1] == "report.html"
    made.clear()
    third = run(tmp_path, budget=bl.Budget(sparsity=0.3), baseline=False)
    assert "tuned" not in made
    assert made[0] == "slim", "without fine-tuning the slim network is another"
    assert not same(weights(second.slim), weights(third.slim))


def small_job(out, callback):
    torch.manual_seed(0)
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    loader = bl.data.Loader(x, (x[:, 0] > 0).long(), 20)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    settings = {"budget": bl.Budget(sparsity=0.5), "formats": (), "baseline": False, "out": out}
    return bl.compress(model, loader, loader, fit={"epochs": 4, "callbacks": [callback]}, **settings)


def kill(epoch):
    if epoch.number == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def small_job_that_is_killed(out):
    torch.set_num_threads(1)
    small_job(out, kill)


def test_killed_in_training_it_resumes_at_the_epoch(tmp_path):
    out = tmp_path / "run"
    assert exit_code_of(small_job_that_is_killed, out) == -signal.SIGKILL
    assert json.loads((out / "run.json").read_text())["done"] == {}
    (checkpoint,) = out.glob("fitted-*.checkpoint")
    seen = []

    def note(epoch):
        seen.append(epoch.number)

    note.__qualname__, note.__module__ = kill.__qualname__, kill.__module__
    small_job(out, note)
    assert seen == [3, 4], "two epochs were complete"
    assert not checkpoint.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": bl.Budget(sparsity=0.5), "model": nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))}, "weights"),
        ({"method": bl.Laplace(structure="diag")}, "method"),
        ({"prior": bl.priors.Normal(0.5)}, "prior"),
        ({"seed": 3}, "seed"),
    ],
)
def test_a_folder_of_another_run_is_refused(finished, options, message):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    with pytest.raises(BayeslimError, match=rf"another run: its {message}"):
        run(finished, **options)
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}


def turned(loader):
    """The same inputs, each with the class after its own."""
    return bl.data.Loader(loader.dataset.x, (loader.dataset.y + 1) % 3, loader.batch_size, loader.shuffle)


def test_other_test_data_are_measured_anew_and_nothing_else_is(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before, (_, val) = run(tmp_path), data()
    monkeypatch.setattr(pipeline, "compact", None)
    after = run(tmp_path, test=turned(val))
    outputs = trained()(val.dataset.x).argmax(-1)
    assert before.rows["dense"].scores.error == pytest.approx(float((outputs != val.dataset.y).double().mean()))
    assert after.rows["dense"].scores.error == pytest.approx(
        float((outputs != (val.dataset.y + 1) % 3).double().mean())
    )


def as_lists(loader):
    return list(loader)


def as_torch(loader):
    return DataLoader(TensorDataset(loader.dataset.x, loader.dataset.y), batch_size=40, shuffle=True)


@pytest.mark.parametrize("given", [as_lists, as_torch, iter])
def test_a_folder_of_other_data_is_refused(given, tmp_path):
    train, val = data()
    job = functools.partial(bl.compress, trained(), budget=BUDGET, steps=1, formats=(), baseline=False, out=tmp_path)
    first = job(given(train), given(val))
    train, _ = data()
    assert same(weights(first.slim), weights(job(given(train), given(val)).slim)), "the same data again"
    train, _ = data()
    with pytest.raises(BayeslimError, match=r"another run: its data was 160 examples \(content"):
        job(given(turned(train)), given(val))
    with pytest.raises(BayeslimError, match=r"another run: its data was 160 examples \(content"):
        job(given(train), given(turned(val)))


def test_other_data_to_stop_training_by_are_other_training(tmp_path):
    _, val = data()
    run(tmp_path, fit={"epochs": 1, "validate": val}, baseline=False)
    run(tmp_path, fit={"epochs": 1, "validate": val}, baseline=False)
    with pytest.raises(BayeslimError, match="another run: its training"):
        run(tmp_path, fit={"epochs": 1, "validate": turned(val)}, baseline=False)


def test_the_network_by_magnitude_leaves_the_checkpoint_of_fine_tuning_alone(tmp_path):
    options = {"epochs": 2, "lr": 1e-3}
    given = run(tmp_path / "a", fine_tune=options | {"checkpoint": tmp_path / "checkpoint"})
    plain = run(tmp_path / "b", fine_tune=options)
    assert (tmp_path / "checkpoint").is_dir()
    for name in ("slim", "magnitude"):
        assert same(weights(bl.load(given.folder / name)), weights(bl.load(plain.folder / name)))


def test_options_of_fine_tuning_that_only_the_method_has_are_not_for_the_network_by_magnitude(tmp_path):
    chains = bl.SGLD(chains=1, samples=2)
    found = run(tmp_path, method=chains, fit={"epochs": 2}, steps=1, fine_tune={"epochs": 2, "dtype": torch.float32})
    assert list(found.rows) == ["dense", "magnitude", "bayeslim"]


def test_a_variational_network_that_was_pruned_before(tmp_path):
    train, _ = data()
    bnn = bl.bayesianize(trained(), bl.Variational(), likelihood=bl.likelihoods.Categorical())
    bnn.fit(train, epochs=1, seed=0)
    found = run(tmp_path, model=bl.prune(bnn, bl.Budget(sparsity=0.3)), fit={"epochs": 1}, baseline=False)
    assert found.plan.sparsity == pytest.approx(0.6, abs=0.02)


def test_other_methods_patterns_plans_and_generators(tmp_path):
    train, val = data()
    variational = bl.Variational(family=bl.families.DiagonalGaussian(initial_std=0.05))
    found = run(tmp_path / "a", method=variational, fit={"epochs": 2}, baseline=False)
    assert list(found.rows) == ["dense", "bayeslim"]
    patterned = run(tmp_path / "b", budget=None, granularity="2:4")
    assert patterned.plan.granularity == "2:4"
    assert patterned.rows["magnitude"].cost.nonzeros == patterned.rows["bayeslim"].cost.nonzeros
    planned = run(tmp_path / "c", budget=patterned.plan, model=patterned.bnn, baseline=False)
    assert planned.plan == patterned.plan
    job = {"budget": BUDGET, "steps": 1, "formats": (), "baseline": False}
    lists = bl.compress(trained(), list(train), (batch for batch in val), out=tmp_path / "d", **job)
    assert lists.rows["dense"].scores.count == 80


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(x) if float(x.sum()) > 0 else -self.layer(x)


def nan_network():
    broken = network()
    with torch.no_grad():
        broken[2].weight[0, 0] = float("nan")
    return broken


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": nan_network()}, BayeslimError, "holds NaN or infinite"),
        ({"model": Untraceable()}, bl.errors.UnsupportedModel, "cannot trace"),
        ({"example": torch.zeros(2, 5)}, bl.errors.ShapeMismatch, "does not run on the example"),
        ({"budget": bl.Plan({"0.weight": torch.ones(12, 8).bool()})}, BayeslimError, "cuts nothing"),
        ({"budget": bl.Plan({"0.weight": torch.zeros(12, 8).bool()})}, BayeslimError, "cuts all"),
        ({"budget": bl.Plan({"x": torch.zeros(2, 2).bool()})}, bl.errors.ShapeMismatch, "for another model"),
        ({"budget": 0.9}, TypeError, "must be a bl.Budget"),
        ({"budget": None}, TypeError, "needs a budget"),
        ({"steps": 0}, ValueError, "steps"),
        ({"fine_tune": {"lr": 1.0}}, ValueError, "needs epochs"),
        ({"fine_tune": 3}, TypeError, "options of training"),
        ({"fine_tune": {"epochs": 1, "lrr": 1}}, TypeError, 'does not take lrr. Closest: "lr".* It takes: epochs, lr,'),
        ({"fine_tune": {"epochs": 1, "tune": "evidence"}}, TypeError, "does not take tune"),
        ({"formats": ("exe",)}, ValueError, "some of onnx, pt2, c"),
        ({"method": bl.Variational()}, ValueError, "is trained"),
        ({"model": "lenet"}, TypeError, "model must be"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_data_that_say_nothing_are_refused(tmp_path):
    train, val = data()
    with pytest.raises(BayeslimError, match="The val loader gave no batches"):
        bl.compress(trained(), train, [], budget=BUDGET, out=tmp_path / "run")
    with pytest.raises(TypeError, match="train must be a loader"):
        bl.compress(trained(), None, val, budget=BUDGET, out=tmp_path / "run")
    values = [(x, y.float()) for x, y in train]
    with pytest.raises(BayeslimError, match="likelihood="):
        bl.compress(trained(), values, val, budget=BUDGET, out=tmp_path / "run")
    fitted = bl.bayesianize(trained(), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    with pytest.raises(TypeError, match="has its method"):
        bl.compress(fitted, train, val, budget=BUDGET, method=bl.Laplace(), out=tmp_path / "run")


def test_everything_cut_is_refused_and_the_fit_is_kept(tmp_path):
    with pytest.raises(ValueError, match="the least possible is"):
        run(tmp_path, budget=bl.Budget(parameters=1))
    assert list(json.loads((tmp_path / "run.json").read_text())["done"]) == ["fitted"]
    assert run(tmp_path, baseline=False).plan.sparsity == pytest.approx(0.6, abs=0.01)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("here before")
    with pytest.raises(BayeslimError, match="must be a folder"):
        run(tmp_path / "file")
    with pytest.raises(BayeslimError, match="Could not write"):
        run(tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "here before"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": "other"}', '{"format": "bayeslim run", "version": 1}', "[" * 9999]
)
def test_a_damaged_index_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(bl.errors.CorruptFile, match="not the index of a run"):
        run(tmp_path)
    assert (tmp_path / "run.json").read_text() == text


def test_damaged_results_are_named_and_made_again_once_deleted(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    whole = run(tmp_path)
    for name in ("measured.json", "benchmark.json"):
        content = (tmp_path / name).read_text()
        for damaged in ("{", "{}", "[1]", '{"dense": 1}'):
            (tmp_path / name).write_text(damaged)
            if damaged != "{}" or name == "benchmark.json":
                with pytest.raises(bl.errors.CorruptFile, match=f"{name} is damaged"):
                    run(tmp_path)
        (tmp_path / name).write_text(content)
    (tmp_path / "measured.json").unlink()
    again = run(tmp_path)
    assert again.rows["bayeslim"].scores.error == whole.rows["bayeslim"].scores.error


def test_a_network_that_lost_much_is_said_to_have(tmp_path):
    result = run(tmp_path, budget=bl.Budget(sparsity=0.97, empty_layers="keep best"), baseline=False)
    dense, slim = (result.rows[name].scores for name in (pipeline.DENSE, pipeline.SLIM))
    assert slim.error > dense.error + notes.MUCH_WORSE
    assert any("Too much was cut" in note for note in result.notes)


@pytest.mark.parametrize(
    ("targets", "knew_nothing"),
    [([0, 0, 0, 0, 0, 0, 1, 1, 1, 2], True), ([0, 0, 0, 0, 1, 1, 1, 2, 2, 2], False), ([-100, 0], False), ([2], False)],
)
def test_a_network_that_knew_nothing_is_said_to_have(targets, knew_nothing, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    rows = run(tmp_path).rows
    scores = dataclasses.replace(
        rows[pipeline.DENSE].scores, error=0.4
    )  # where one answer is wrong for 0.4 of the first
    rows = {pipeline.DENSE: dataclasses.replace(rows[pipeline.DENSE], scores=scores)}
    found = notes.untrained(rows, [(None, torch.tensor(targets))])
    assert [note.split(":")[0] for note in found] == ["The network knew nothing before the cut"] * knew_nothing


def test_a_network_that_lost_little_is_left_in_peace(tmp_path):
    found = run(tmp_path, budget=bl.Budget(sparsity=0.05), baseline=False).notes
    assert not [note for note in found if "faster" not in note]  # time is another matter


def test_the_same_run_started_twice_says_so(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    with locked(tmp_path), pytest.raises(BayeslimError, match=f"is being written to by process {os.getpid()}"):
        run(tmp_path)
    assert run(tmp_path).rows
    assert not (tmp_path / LOCK_FILE).exists()


def test_exported_files_that_are_gone_or_truncated_are_written_again(tmp_path):
    whole = run(tmp_path, formats=("pt2",), baseline=False)
    file = tmp_path / "slim.pt2"
    x, content = torch.randn(4, 8), file.read_bytes()
    for damaged in (None, content[: len(content) // 2]):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        again = run(tmp_path, formats=("pt2",), baseline=False)
        assert file in again.files
        assert torch.allclose(torch.export.load(file).module()(x), whole.slim(x), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("exported.json", lambda found: found.pop("notes")),
        ("exported.json", lambda found: found.update(files=["slim.pt2"])),
        ("exported.json", lambda found: found.update(files={"../slim.pt2": "0"})),
        ("measured.json", lambda found: found.pop("dense")),
        ("measured.json", lambda found: found.pop("bayeslim")),
        ("measured.json", lambda found: found["dense"].update(seconds="soon")),
        ("measured.json", lambda found: found["dense"]["scores"].update(error=None)),
        ("measured.json", lambda found: found["dense"]["cost"].update(bytes="many")),
        ("exported.json", lambda found: found.update(extra=1)),
        ("measured.json", lambda found: found.update(extra=found["dense"])),
        ("measured.json", lambda found: found["dense"].update(extra=1)),
        ("measured.json", lambda found: found["dense"]["scores"].update(nll=float("nan"))),
        ("measured.json", lambda found: found["dense"]["scores"]["calibration"].update(extra=[])),
        ("measured.json", lambda found: found["dense"]["scores"]["calibration"]["count"].pop()),
        ("measured.json", lambda found: found["dense"]["scores"]["calibration"]["edges"].pop()),
        ("benchmark.json", lambda found: found.update(extra=1)),
        ("benchmark.json", lambda found: found["sizes"]["slim"].update(extra=1)),
        ("benchmark.json", lambda found: found["timings"][0].update(extra=1)),
        ("benchmark.json", lambda found: found["timings"][0].update(seconds=[float("inf")])),
        ("benchmark.json", lambda found: found["sizes"].pop("slim")),
        ("benchmark.json", lambda found: found["timings"].clear()),
        ("benchmark.json", lambda found: found["timings"].pop(0)),
        ("benchmark.json", lambda found: found["timings"][0].update(seconds=["a"])),
    ],
)
def test_results_that_were_changed_are_named(finished, tmp_path, name, change):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / name).read_text())
    change(content)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(bl.errors.CorruptFile, match=f"{name} is damaged"):
        run(tmp_path)


def test_magnitude_cuts_in_as_many_steps(tmp_path, monkeypatch):
    seen = []
    original = baseline.prune

    def watched(bnn, what, **options):
        seen.append((options["steps"], options["criterion"]))
        return original(bnn, what, **options)

    monkeypatch.setattr(baseline, "prune", watched)
    run(tmp_path, steps=3)
    assert seen == [(3, "magnitude")]


def test_a_latency_is_measured_once(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    found = run(tmp_path)
    timed = {name: found.benchmark.latency(name, "eager", 1) for name in ("dense", "magnitude", "slim")}
    assert [found.rows[name].seconds for name in ("dense", "magnitude", "bayeslim")] == list(timed.values())
