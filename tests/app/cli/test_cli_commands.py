"""The commands as a person types them."""

from __future__ import annotations

import functools
import runpy
import sys

import pytest
import torch
from typed_commands import call

import bayeslim as bl
from bayeslim.app.cli import demo
from bayeslim.app.cli.app import app
from bayeslim.app.compress import pipeline

MODEL = "mlp(hidden=12, inputs=64)"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    few = functools.partial(bl.benchmark, runtimes=["eager"], rounds=2, batch_sizes=(1,))
    monkeypatch.setattr(pipeline, "benchmark", few)
    monkeypatch.setattr(pipeline, "has_onnx", lambda: False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A folder with a fitted network."""
    data = bl.data.load("digits")
    torch.manual_seed(0)
    model = bl.zoo.create("mlp", hidden=12, inputs=64)
    bnn = bl.bayesianize(model, bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    bnn.fit(bl.data.Loader(data.train_x, data.train_y), epochs=3, lr=0.01, seed=0, progress=False)
    path = tmp_path_factory.mktemp("network") / "fitted"
    bl.save(bnn, path)
    return path


def brief_report(bnn, pruned, slim, path, **options):
    path.write_text("a report")
    return path


def test_compress_by_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "report", brief_report)
    run = tmp_path / "run"
    words = ("--model", MODEL, "--data", "digits", "--recipe", "sparse-vd(epochs=3)", "--out", run)
    assert call("compress", *words, "--fine-tune", 1) == 0
    assert "bayeslim" in capsys.readouterr().out
    assert call("compress", "--config", run / "run.toml") == 0
    words = ("--model", MODEL, "--data", "digits", "--recipe", "sparse-dv", "--out", tmp_path / "other")
    assert call("compress", *words) == 1
    assert "There are: bottleneck" in capsys.readouterr().err


def test_compress_then_report_again(tmp_path, capsys):
    run = tmp_path / "run"
    settings = ("--data", "digits", "--epochs", 2, "--lr", 0.01, "--sparsity", 0.5, "--steps", 2, "--format", "pt2")
    assert call("compress", "--model", MODEL, "--out", run, *settings) == 0
    shown = capsys.readouterr().out
    for words in ("dense", "magnitude", "bayeslim", "slim.pt2", "report.html"):
        assert words in shown
    assert (run / "slim.pt2").exists()
    before = (run / "report.html").stat().st_mtime_ns
    assert call("compress", "--config", run / "run.toml") == 0
    assert (run / "report.html").stat().st_mtime_ns == before, "nothing is made twice"
    assert call("report", run, "--to", tmp_path / "again.html", "--title", "A title") == 0
    assert "<h1>A title</h1>" in (tmp_path / "again.html").read_text()


def test_prune_in_one_cut_or_in_steps_with_data(tmp_path, fitted, capsys):
    assert call("prune", fitted, "--out", tmp_path / "one", "--sparsity", 0.8) == 0
    assert "80.0" in capsys.readouterr().out
    pruned = bl.load(tmp_path / "one")
    assert pruned.plan_.sparsity == pytest.approx(0.8, abs=0.01)
    assert set(pruned.masks) == {"fc1.weight", "fc2.weight", "fc3.weight"}
    steps = ("--data", "digits", "--granularity", "unit", "--keep-best", "--steps", 2)
    assert call("prune", fitted, "--out", tmp_path / "two", "--sparsity", 0.5, *steps) == 0
    assert bl.load(tmp_path / "two").plan_.granularity == "unit"
    assert call("prune", fitted, "--out", tmp_path / "three", "--granularity", "2:4") == 0


@pytest.mark.parametrize(
    "words", [("--sparsity", 0.5, "--granularity", "unit"), ("--flops", 1000), ("--max-error-increase", 0.5)]
)
def test_prune_names_the_flag_for_the_data_it_needs(words, tmp_path, fitted, capsys):
    assert call("prune", fitted, "--out", tmp_path / "x", *words) == 1
    shown = capsys.readouterr().err
    assert words[-2] in shown
    assert "pass --data NAME" in shown


def test_export_by_shape_or_data(tmp_path, fitted, capsys):
    assert call("export", fitted, "--to", tmp_path / "mean.pt2", "--shape", "1x8x8") == 0
    assert "Exported" in capsys.readouterr().out
    assert (tmp_path / "mean.pt2").exists()
    with pytest.warns(bl.errors.BayeslimWarning, match="linearised"):
        assert call("export", fitted, "--to", tmp_path / "four.pt2", "--data", "digits", "--samples", 4) == 0
    assert (tmp_path / "four.pt2").exists()


def test_a_pruned_network_is_exported_without_its_units(tmp_path, fitted, capsys):
    words = ("--sparsity", 0.5, "--data", "digits", "--granularity", "unit", "--steps", 1)
    assert call("prune", fitted, "--out", tmp_path / "pruned", *words) == 0
    for source, name in ((fitted, "whole"), (tmp_path / "pruned", "slim")):
        assert call("export", source, "--to", tmp_path / f"{name}.pt2", "--data", "digits") == 0
    whole, slim = (torch.export.load(tmp_path / f"{name}.pt2") for name in ("whole", "slim"))
    sizes = [sum(tensor.numel() for tensor in program.state_dict.values()) for program in (whole, slim)]
    assert sizes[1] < 0.65 * sizes[0]
    x = bl.data.load("digits").test_x
    torch.testing.assert_close(slim.module()(x), bl.load(tmp_path / "pruned").mean_network()(x), atol=1e-4, rtol=1e-4)


def test_a_network_that_cannot_be_traced_is_exported_whole(tmp_path, fitted, monkeypatch):
    assert call("prune", fitted, "--out", tmp_path / "pruned", "--sparsity", 0.5) == 0

    def refuse(*args, **kwargs):
        raise bl.errors.UnsupportedModel("It cannot be traced.")

    monkeypatch.setattr("bayeslim.app.cli.parts.compact", refuse)
    with pytest.warns(bl.errors.BayeslimWarning, match="still holds the units that were cut: It cannot be traced"):
        assert call("export", tmp_path / "pruned", "--to", tmp_path / "whole.pt2", "--shape", "1x8x8") == 0
    assert (tmp_path / "whole.pt2").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compress",), "needs model and data"),
        (("compress", "--model", "lenet5", "--data", "digits"), "exactly one of --sparsity"),
        (("compress", "--model", MODEL, "--data", "digits", "--sparsity", "3"), "between 0 and 1"),
        (("compress", "--model", "lenet5", "--data", "digits", "--sparsity", "0.5"), "does not run on the example"),
        (("compress", "--model", "lenet7", "--data", "digits", "--sparsity", "0.5"), "Closest"),
        (("prune", "nowhere", "--out", "x", "--sparsity", "0.5"), "does not exist"),
        (("export", "nowhere", "--to", "x.onnx", "--shape", "3"), "does not exist"),
        (("report", "nowhere"), "no finished run"),
        (("gallery", "conditioning", "two_moon"), 'no picture "two_moon". Closest names: "two_moons"'),
        (("gallery", "conditioning", "--theme", "pink"), 'theme must be light, dark or both. Got "pink"'),
    ],
)
def test_mistakes_get_a_message_and_no_traceback(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert call(*words) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert not list(tmp_path.iterdir())


def test_other_mistakes_of_the_parts(tmp_path, fitted, capsys):
    plain = tmp_path / "plain"
    bl.save(bl.zoo.create("mlp", hidden=4, inputs=64), plain)
    assert call("prune", plain, "--out", tmp_path / "x", "--sparsity", 0.5) == 1
    assert "holds a plain network" in capsys.readouterr().err
    assert call("export", fitted, "--to", tmp_path / "x.pt2") == 1
    assert "either --data NAME or --shape" in capsys.readouterr().err
    assert call("export", fitted, "--to", tmp_path / "x.pt2", "--shape", "8by8") == 1
    assert "whole numbers" in capsys.readouterr().err
    assert call("export", fitted, "--to", tmp_path / "x.exe", "--shape", "1x8x8") == 1
    assert ".onnx" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_errors_of_the_users_own_code_keep_their_traceback(tmp_path, monkeypatch):
    (tmp_path / "own_nets.py").write_text("def build():\n    raise ValueError('mine')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match="mine"):
        app(["compress", "--model", "own_nets:build", "--data", "digits", "--sparsity", "0.5"])
    sys.modules.pop("own_nets")


def test_a_run_that_is_interrupted_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "prune", interrupt)
    words = ("compress", "--model", MODEL, "--data", "digits", "--epochs", 1, "--sparsity", 0.5)
    assert call(*words, "--out", tmp_path / "run") == 130
    assert "goes on from" in capsys.readouterr().err
    assert (tmp_path / "run" / "fitted").exists()


def test_the_demonstration_ends_in_a_table_and_a_report(tmp_path, monkeypatch, capsys):
    small = {"model": MODEL, "epochs": 3, "steps": 1, "granularity": "weight", "sparsity": 0.6}
    monkeypatch.setattr(demo, "SETTINGS", demo.SETTINGS | small)
    demo.run(tmp_path / "demo", seed=0)
    shown = capsys.readouterr().out
    for words in (
        "most certain",
        "least certain",
        "dense",
        "magnitude",
        "bayeslim",
        "Latency of one input",
        "report.html",
    ):
        assert words in shown
    assert (tmp_path / "demo" / "report.html").exists()


def test_version_and_help(capsys):
    assert call("--version") == 0
    assert bl.__version__ in capsys.readouterr().out
    assert call("compress", "--help") == 0
    assert "--sparsity" in capsys.readouterr().out


def test_help_as_a_command(capsys):
    assert call("help") == 0
    assert "compress" in capsys.readouterr().out
    assert call("help", "prune") == 0
    assert "--sparsity" in capsys.readouterr().out
    assert call("help", "nothing") == 2
    assert "No such command" in capsys.readouterr().err


def test_the_shell_can_complete(capsys, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert call("--show-completion", "bash") == 0
    assert "complete" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["demo", "fit", "predict", "evaluate", "compress", "prune", "export", "report"])
def test_every_command_that_computes_takes_a_device(command, capsys):
    assert call(command, "--help") == 0
    assert "--device" in capsys.readouterr().out


def test_a_device_that_is_not_there_is_refused_before_any_work(tmp_path, fitted, capsys):
    absent = ("--device", "cuda:77")
    words = ("--model", MODEL, "--data", "digits", "--sparsity", 0.5, "--out", tmp_path / "run")
    assert call("compress", *words, *absent) == 1
    assert call("prune", fitted, "--out", tmp_path / "x", "--sparsity", 0.5, *absent) == 1
    assert call("export", fitted, "--to", tmp_path / "x.pt2", "--shape", "1x8x8", *absent) == 1
    assert capsys.readouterr().err.count('device="cuda:77" cannot be used') == 3
    assert not list(tmp_path.iterdir())


def test_it_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bayeslim", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("bayeslim", run_name="__main__")
    assert "compress" in capsys.readouterr().out


def test_the_gallery_draws_the_pictures_that_are_named(tmp_path, capsys):
    assert call("gallery", "conditioning", "--out", tmp_path / "pictures", "--theme", "both") == 0
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == ["conditioning_dark.svg", "conditioning_light.svg"]
    assert capsys.readouterr().out.split() == [str(tmp_path / "pictures" / name) for name in names[::-1]]


def test_the_gallery_names_its_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call("gallery", "--out", tmp_path / "pictures") == 1
    assert "bayeslim[plots]" in capsys.readouterr().err
    assert not (tmp_path / "pictures").exists()
