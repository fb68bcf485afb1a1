"""`bayeslim fit`: the same network as the same calls in Python, whatever happens on the way."""

from __future__ import annotations

import sys
import tomllib

import pytest
import torch
from typed_commands import call

import bayeslim as bl
from bayeslim.app.cli import sources
from bayeslim.app.cli.calls import BadSetting
from bayeslim.app.cli.fitting import FitSettings
from bayeslim.train import fit as training

MODEL = "mlp(hidden=8, inputs=64)"
BASICS = ("fit", "--model", MODEL, "--data", "digits", "--epochs", 3, "--lr", 0.01)
OWN = """
import torch
from torch import nn

def build(width=4):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))

def loaders():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return [(x[:20], y[:20]), (x[20:30], y[20:30])], [(x[30:], y[30:])]
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("BAYESLIM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    (tmp_path / "own_fits.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_fits", None)


def same_networks(one, other) -> bool:
    one, other = (bl.load(folder).state_dict() for folder in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def by_python(epochs=3) -> bl.Bayesian:
    torch.manual_seed(0)
    model = bl.zoo.create("mlp", hidden=8, inputs=64)
    data = bl.data.load("digits").with_validation(0.1, 0)
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical())
    loader = bl.data.Loader(data.train_x, data.train_y, 128, seed=0)
    bnn.fit(loader, epochs=epochs, lr=0.01, seed=0, progress=False)
    return bnn.eval()


def stopped_in_the_second_epoch(monkeypatch) -> list[int]:
    """Interrupt the next fit; the list gets an entry for every epoch."""
    measure, measured = training.measure, []

    def stop_in_the_second_epoch(*args):
        measured.append(1)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(training, "measure", stop_in_the_second_epoch)
    return measured


def test_a_fit_is_what_python_would_have_made_and_is_not_made_twice(tmp_path, capsys):
    assert call(*BASICS, "--out", "run") == 0
    shown = capsys.readouterr().out
    for words in ("130 held-out examples of digits", "error", "NLL", "ECE", "mean network", "bayeslim evaluate run"):
        assert words in shown
    bl.save(by_python(), tmp_path / "python")
    assert same_networks("run/network", "python")
    assert tomllib.loads((tmp_path / "run" / "fit.toml").read_text()) == {
        "model": MODEL, "data": "digits", "out": "run", "epochs": 3, "lr": 0.01,
    }  # fmt: skip
    assert not list((tmp_path / "run").glob("*.checkpoint"))
    before = (tmp_path / "run" / "network" / "bayeslim.json").stat().st_mtime_ns
    assert call("fit", "--config", "run/fit.toml") == 0
    assert capsys.readouterr().out == shown
    assert (tmp_path / "run" / "network" / "bayeslim.json").stat().st_mtime_ns == before


def test_a_fit_that_was_stopped_goes_on_exactly(tmp_path, monkeypatch, capsys):
    measured = stopped_in_the_second_epoch(monkeypatch)
    assert call(*BASICS, "--out", "run") == 130
    assert "goes on from run" in capsys.readouterr().err
    assert list((tmp_path / "run").glob("*.checkpoint"))
    assert call("evaluate", "run") == 1
    assert "not finished. To finish it, run the `bayeslim fit` command that began it" in capsys.readouterr().err
    assert call(*BASICS, "--out", "run") == 0
    assert len(measured) == 4, "the first epoch is not trained again"
    bl.save(by_python(), tmp_path / "python")
    assert same_networks("run/network", "python")


def test_a_folder_of_another_fit_is_refused_unless_nothing_came_of_it(tmp_path, capsys):
    assert call(*BASICS, "--out", "run", "--lr", "1e30") == 1
    assert "smaller learning rate" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert call(*BASICS, "--out", "run") == 0
    capsys.readouterr()
    assert call(*BASICS, "--out", "run", "--lr", 0.02) == 1
    assert "run holds another run: its lr was 0.01, and is now 0.02" in capsys.readouterr().err
    assert tomllib.loads((tmp_path / "run" / "fit.toml").read_text())["lr"] == 0.01


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_folder_of_a_fit_to_other_data_is_refused(own_code, tmp_path, monkeypatch, capsys, is_finished):
    words = ("fit", "--model", "own_fits:build", "--data", "own_fits:loaders", "--epochs", 2)
    if not is_finished:
        stopped_in_the_second_epoch(monkeypatch)
    assert call(*words) == (0 if is_finished else 130)
    assert bool(list((tmp_path / "fit").glob("*.checkpoint"))) != is_finished
    sys.modules.pop("own_fits")
    (tmp_path / "own_fits.py").write_text(OWN.replace("> 0", "< 0.01"))  # as many rows
    capsys.readouterr()
    assert call(*words) == 1
    shown = capsys.readouterr().err
    assert "fit holds another run: its content of the data was 30 examples (content " in shown


def test_laplace_trains_first_or_takes_weights_as_they_are(capsys):
    assert call(*BASICS, "--out", "trained", "--method", "laplace(structure='diag')", "--tune", "evidence") == 0
    trained = bl.load("trained/network")
    assert trained.method == bl.Laplace(structure="diag")
    weights = ("fit", "--model", MODEL, "--data", "digits", "--method", "laplace", "--weights", "trained")
    assert call(*weights, "--out", "taken") == 0
    taken = bl.load("taken/network")
    assert all(torch.equal(w, taken.posterior_.mean[name]) for name, w in trained.posterior_.mean.items())
    assert taken.method == bl.Laplace()


def test_networks_and_data_of_ones_own(own_code, capsys):
    own = ("--model", "own_fits:build(width=5)", "--data", "own_fits:loaders")
    assert call("fit", *own, "--epochs", 2, "--out", "run") == 0
    assert f'bayeslim evaluate run --model "{own[1]}" --data "{own[3]}"' in capsys.readouterr().out
    assert call("evaluate", "run", *own) == 0
    assert "own_fits:loaders, validation part: 10 examples" in capsys.readouterr().out
    assert call("evaluate", "run") == 1
    shown = capsys.readouterr().err
    assert "--model package.module:name" in shown
    assert "own_fits" not in shown
    assert call("evaluate", "run", *own[:2]) == 1
    shown = capsys.readouterr().err
    assert "--data package.module:name" in shown
    assert "own_fits" not in shown


def test_a_file_with_tables_means_what_the_flags_mean(tmp_path):
    (tmp_path / "fit.toml").write_text(
        f'model = "{MODEL}"\ndata = "digits"\nepochs = 3\nlr-schedule = "cosine"\n'
        '[method]\nname = "variational"\nsamples = 2\nestimator = "shared"\n'
        'family = { name = "diagonal", initial-std = 0.05 }\nkl_schedule = { name = "warmup", end = 5 }\n'
        '[prior]\nname = "normal"\nstd = 0.5\n[likelihood]\nname = "categorical"\n'
    )
    method = (
        "variational(samples=2, estimator='shared', family=diagonal(initial_std=0.05), kl_schedule=warmup(end=5))"
    )  # fmt: skip
    flags = {
        "model": MODEL, "data": "digits", "epochs": 3, "lr_schedule": "cosine", "method": method,
        "prior": "normal(std=0.5)", "likelihood": "categorical",
    }  # fmt: skip
    settings = FitSettings.read(tmp_path / "fit.toml", {"lr": None})
    assert settings == FitSettings.read(None, flags)
    assert sources.method_by_name(settings.method) == bl.Variational(
        samples=2,
        estimator="shared",
        family=bl.families.DiagonalGaussian(initial_std=0.05),
        kl_schedule=bl.schedules.Warmup(end=5),
    )
    assert FitSettings.read(tmp_path / "fit.toml", {"method": "laplace"}).method == "laplace"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[method]\nsamples = 2", 'The table "method" needs a name'),
        ('[method]\nname = "variational"\nkl_schedule = { end = 3 }', 'The table "kl_schedule" needs a name'),
        ('[method]\nname = "variational"\nsamples = 2020-01-01', '"samples" must be a number'),
        ("[epochs]\nname = 3", '"epochs" must be a whole number'),
        ("sparsity = 0.5", 'not a setting. Closest|"sparsity", which is not a setting'),
        ("seed = -1", "from 0 to"),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, message):
    (tmp_path / "fit.toml").write_text(f'model = "mlp"\ndata = "digits"\n{text}\n')
    with pytest.raises(BadSetting, match=message):
        FitSettings.read(tmp_path / "fit.toml", {})


def test_priors_may_be_made_of_priors():
    prior = sources.prior_by_name("normal(learn=True, hyperprior=student_t(df=4.0))")
    assert prior == bl.priors.Normal(learn=True, hyperprior=bl.priors.StudentT(df=4.0))


def test_gates_by_name():
    text = "variational(family=point(), gates=hard_concrete(cost=5.0), gate_at={'fc1': 'inputs'})"
    assert sources.method_by_name(text) == bl.Variational(
        bl.families.Point(), gates=bl.gates.HardConcrete(cost=5.0), gate_at={"fc1": "inputs"}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("variational(kl_schedule=warmpu(5))", 'no part called "warmpu". Closest: "warmup"'),
        ("variational(kl_schedule=warmup())", "missing a required argument: 'end'"),
        ("variational(kl_schedule=open('x'))", 'no part called "open"'),
        ("variational(kl_schedule='warmup')", "must be one of bayeslim.schedules"),
        ("variational(samples='two')", "samples must be a whole number"),
        ("variational(kl_schedule=warmup(end=open('x')))", 'no part called "open"'),
        ("variational(kl_schedule=os.system('x'))", "cannot be read"),
        ("variational(kl_schedule=warmup)", "cannot be read"),
    ],
)
def test_parts_of_a_method_that_are_not_there_are_refused(text, message):
    with pytest.raises(BadSetting, match=message):
        sources.method_by_name(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "fit needs model and data"),
        (("--model", MODEL, "--data", "digits"), "say how long, such as --epochs 10"),
        (("--model", MODEL, "--data", "digits", "--method", "laplace"), "needs a trained network"),
        (("--model", "mlp", "--data", "digits", "--epochs", 2), "For digits it takes inputs=64."),
        (("--model", "mlp(inputs=64, classes=3)", "--data", "digits", "--epochs", 2), "it takes classes=10."),
        (("--model", MODEL, "--data", "digits", "--epochs", 2, "--likelihood", "gaussian"), "Got (130,)."),
        (("--model", "mlp(inputs=[report])", "--data", "digits", "--epochs", 2), 'model="mlp(inputs=[report])" cannot'),
        (("--model", "mlp(hidden=-2)", "--data", "digits", "--epochs", 2), "negative dimension"),
        (("--model", MODEL, "--data", "digits", "--epochs", 0), "epochs must be at least 1"),
        (("--model", MODEL, "--data", "digits", "--epochs", 2, "--lr", -1), "lr must be a positive number"),
        (("--model", MODEL, "--data", "digits", "--epochs", 2, "--lr-schedule", "x"), "half-then-linear"),
        (("--model", MODEL, "--data", "digits", "--epochs", 2, "--patience", 0), "patience must be at least 1"),
        (("--model", MODEL, "--data", "digits", "--epochs", 2, "--tune", "grid"), "tune chooses the prior of laplace"),
        (
            ("--model", MODEL, "--data", "digits", "--epochs", 2, "--method", "laplace", "--tune", "x"),
            "tune must be one of evidence",
        ),
        (
            ("--model", MODEL, "--data", "digits", "--method", "laplace", "--tune", "online", "--weights", "x"),
            'tune="online" chooses the prior during training',
        ),
        (("--model", MODEL, "--data", "digits", "--epochs", 2, "--device", "abacus"), "torch finds no such device"),
        (("--model", MODEL, "--data", "digits", "--epochs", 2, "--device", "meta"), "torch finds no such device"),
        (("--model", MODEL, "--data", "digits", "--epochs", 2, "--validation", 2), "leave some of the 1297"),
        (("--model", MODEL, "--data", "digits", "--epochs", 2, "--batch-size", 0), "batch_size must be at least 1"),
        (("--model", MODEL, "--data", "digit", "--epochs", 2), 'Closest: "digits"'),
        (("--model", MODEL, "--data", "boston", "--epochs", 2), "boston was not found"),
        (("--config", "nowhere.toml"), "Could not read nowhere.toml"),
    ],
)  # fmt: skip
def test_mistakes_get_one_line_and_leave_nothing_behind(tmp_path, capsys, words, message):
    assert call("fit", *words) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_particles_by_steins_method():
    call("fit", "--model", MODEL, "--data", "digits", "--method", "svgd(particles=2)", "--epochs", 1)
    assert bl.load("fit/network").posterior_.count == 2


def test_a_run_that_fails_takes_back_only_what_it_wrote(tmp_path):
    (tmp_path / "run").mkdir()
    assert call(*BASICS, "--out", "run", "--lr", "1e30") == 1
    assert (tmp_path / "run").is_dir()
    assert not any((tmp_path / "run").iterdir())
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert call(*BASICS, "--out", "run", "--lr", "1e30") == 1
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_a_student_has_no_data_to_be_fitted_to(capsys):
    assert call("fit", "--help") == 0
    shown = capsys.readouterr().out
    assert "svgd" in shown
    assert "student" not in shown.replace("student_t", "")
    assert call(*BASICS, "--method", "student") == 1
    assert 'there is no method called "student"' in capsys.readouterr().err
