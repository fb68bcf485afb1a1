"""Folders from someone else: no command runs, or hands on as a command, the code that a file in them names."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from torch import nn
from typed_commands import call

import bayeslim as bl
from bayeslim.app.cli.calls import BadSetting
from bayeslim.app.cli.sources import data_by_name, model_by_name
from bayeslim.app.compress import pipeline

MODEL = "mlp(hidden=12, inputs=64)"
HOSTILE = "os:system('echo ran > pwned')"
QUIET_HOSTILE = "hostile_code:build"
CODE = """
from os import system
from functools import cache, partial
from pathlib import Path
from torch import nn

open("pwned", "w").close()

def build(width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

cached = cache(build)
half = partial(build, 2)
ready = build()
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    few = functools.partial(bl.benchmark, runtimes=["eager"], rounds=2, batch_sizes=(1,))
    monkeypatch.setattr(pipeline, "benchmark", few)
    monkeypatch.setattr(pipeline, "has_onnx", lambda: False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "hostile_code.py").write_text(CODE)
    yield
    sys.modules.pop("hostile_code", None)


def nothing_ran(tmp_path) -> bool:
    return not (tmp_path / "pwned").exists() and "hostile_code" not in sys.modules


@pytest.mark.parametrize("hostile", [HOSTILE, QUIET_HOSTILE])
@pytest.mark.parametrize("setting", ["model", "data"])
def test_report_runs_no_code_that_the_folder_names(tmp_path, capsys, hostile, setting):
    named = {"model": MODEL, "data": "digits"} | {setting: hostile}
    (tmp_path / "run").mkdir()
    lines = [f'model = "{named["model"]}"', f'data = "{named["data"]}"', "sparsity = 0.5"]
    (tmp_path / "run" / "run.toml").write_text("\n".join(lines))
    assert call("report", "run") == 1
    shown = capsys.readouterr()
    assert nothing_ran(tmp_path)
    assert f"--{setting} package.module:name" in shown.err
    assert hostile not in shown.err + shown.out


@pytest.mark.parametrize("hostile", [HOSTILE, QUIET_HOSTILE])
@pytest.mark.parametrize("words", [("predict", "run", "--to", "p.csv"), ("evaluate", "run")])
def test_predict_and_evaluate_neither_run_nor_quote_it(tmp_path, capsys, hostile, words):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    bl.save(bl.bayesianize(network, bl.Variational(), likelihood=bl.likelihoods.Categorical()), "run/network")
    (tmp_path / "run" / "fit.toml").write_text(f'model = "{hostile}"\ndata = "{hostile}"\nepochs = 1\n')
    assert call(*words) == 1
    shown = capsys.readouterr()
    assert hostile.partition("(")[0] not in shown.err + shown.out
    network = bl.zoo.create("mlp", hidden=4, inputs=64)
    own = bl.bayesianize(network, bl.Variational(), likelihood=bl.likelihoods.Categorical())
    bl.save(own, "run/network")
    assert call(*words) == 1
    shown = capsys.readouterr()
    assert "--data package.module:name" in shown.err
    assert hostile.partition("(")[0] not in shown.err + shown.out
    assert nothing_ran(tmp_path)


def test_a_fit_that_is_not_finished_hands_on_no_command(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "fit.toml").write_text(f'model = "{QUIET_HOSTILE}"\ndata = "digits"\nepochs = 1\n')
    assert call("evaluate", "run") == 1
    shown = capsys.readouterr().err
    assert "--config" not in shown
    assert "hostile" not in shown


def test_a_folder_does_not_choose_where_data_are_read_or_written(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text(
        f'model = "{MODEL}"\ndata = "mnist(root=\'elsewhere\')"\nsparsity = 0.5\n'
    )
    assert call("report", "run") == 1
    assert "a folder may not choose" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()


def test_errors_that_quote_a_file_do_not_control_the_terminal(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text(f'model = "{MODEL}"\ndata = "\\u001b[2Jx"\nsparsity = 0.5\n')
    assert call("report", "run") == 1
    assert "\x1b[2J" not in capsys.readouterr().err


def test_a_report_never_trains(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text(f'model = "{MODEL}"\ndata = "digits"\nepochs = 1\nsparsity = 0.5\n')
    assert call("report", "run") == 1
    assert "not the index of a run" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["run.toml"]


def brief_report(bnn, pruned, slim, path, **options):
    path.write_text("a report")
    return path


def test_code_that_the_user_names_again_is_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "report", brief_report)
    words = ("--data", "digits", "--epochs", 1, "--sparsity", 0.5, "--steps", 1, "--no-baseline", "--out", "run")
    assert call("compress", "--model", QUIET_HOSTILE, *words) == 0
    (tmp_path / "run" / "report.html").unlink()
    assert call("report", "run") == 1
    assert "--model package.module:name" in capsys.readouterr().err
    assert call("report", "run", "--model", QUIET_HOSTILE) == 0
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HOSTILE, "os is part of Python"),
        ("os.path:join", "os.path is part of Python"),
        ("builtins:eval('1')", "builtins is part of Python"),
        ("hostile_code:system('true')", "system is part of Python"),
        ("hostile_code:Path('x')", "Path is part of Python"),
        ("hostile_code:half", "must name a class or a function. Got partial"),
    ],
)
def test_factories_are_classes_and_functions_outside_the_standard_library(text, message):
    with pytest.raises(BadSetting, match=message):
        model_by_name(text)
    with pytest.raises(BadSetting, match=message):
        data_by_name(text, 8, 0.1, 0)


def test_other_factories_and_finished_objects_are_taken():
    for text in ("hostile_code:build(width=3)", "hostile_code:cached(width=3)", "hostile_code:ready"):
        assert isinstance(model_by_name(text), nn.Module)
    assert isinstance(model_by_name("torch.nn:Linear(3, 2)"), torch.nn.Linear)
