"""`bayeslim predict` and `bayeslim evaluate`: the numbers are those of the library, and go where they are told to."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typed_commands import call

import bayeslim as bl
from bayeslim.app.cli.predicting import in_units_of, predict_batches
from bayeslim.app.cli.prediction_files import write_prediction
from bayeslim.app.data.uci import UCI_SETS
from bayeslim.results import Prediction
from bayeslim.train.dataset import Scale

REGRESSION = "mlp(hidden=5, inputs=6, classes=1, depth=1)"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """A folder with a network fitted to the digits."""
    out = tmp_path_factory.mktemp("classes") / "run"
    words = ("--model", "mlp(hidden=12, inputs=64)", "--data", "digits", "--epochs", 3, "--lr", 0.01)
    assert call("fit", *words, "--out", out) == 0
    return out


@pytest.fixture(scope="module")
def yacht(tmp_path_factory):
    """A root with numbers in the place of a regression set, far from standardised."""
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    x = random.normal(50, 20, (UCI_SETS["yacht"].rows, 6))
    y = 1000 + 3 * x[:, 0] - 2 * x[:, 1] + random.normal(0, 5, len(x))
    (root / "uci").mkdir()
    np.savez(root / "uci" / "yacht.npz", x=x, y=y)
    return root


@pytest.fixture(scope="module")
def values(tmp_path_factory, yacht):
    """A folder with a network fitted to values."""
    out = tmp_path_factory.mktemp("values") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAYESLIM_DATA", str(yacht))
        words = ("--model", REGRESSION, "--data", "yacht", "--epochs", 30, "--lr", 0.02, "--batch-size", 32)
        assert call("fit", *words, "--out", out) == 0
    return out


@pytest.fixture
def with_yacht(yacht, monkeypatch):
    monkeypatch.setenv("BAYESLIM_DATA", str(yacht))


def by_python(folder, x, samples=8, how="auto") -> Prediction:
    generator = torch.Generator().manual_seed(0)
    return bl.predict(bl.load(folder / "network"), x, samples, how, generator=generator)


def rows_of(file):
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


def test_predictions_of_classes_as_a_table_and_as_arrays(classes, capsys):
    assert call("predict", classes, "--to", "p.csv", "--samples", 8) == 0
    assert "p.csv: digits, test part. Prediction of classes: 500 examples from 8 samples" in capsys.readouterr().out
    assert call("predict", classes, "--samples", 8) == 0
    printed = capsys.readouterr()
    assert printed.out == Path("p.csv").read_text()
    assert "standard output: digits, test part" in printed.err
    assert call("predict", classes / "network", "--data", "digits", "--to", "p.npz", "--samples", 8) == 0
    digits = bl.data.load("digits")
    wanted = by_python(classes, digits.test_x)
    arrays, rows = np.load("p.npz"), rows_of("p.csv")
    assert len(rows) == 500
    assert [int(row["target"]) for row in rows] == digits.test_y.tolist()
    assert [int(row["class"]) for row in rows] == wanted.classes.tolist()
    assert np.array_equal(arrays["class"], wanted.classes)
    for name, values in {
        "entropy": wanted.entropy,
        "aleatoric": wanted.aleatoric,
        "epistemic": wanted.epistemic,
        "confidence": wanted.probs.max(-1).values,
    }.items():
        np.testing.assert_allclose(arrays[name], values, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose([float(row[name]) for row in rows], arrays[name], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(arrays["probability"], wanted.probs, rtol=1e-4, atol=1e-6)
    assert float(rows[3]["probability_7"]) == pytest.approx(float(arrays["probability"][3, 7]), rel=1e-6)


def test_predictions_of_values_are_in_the_units_of_the_data(values, with_yacht):
    assert call("predict", values, "--to", "p.csv", "--samples", 8) == 0
    data, raw = bl.data.load("yacht"), bl.data.load("yacht", scaled=False)
    wanted, unit = by_python(values, data.test_x), float(data.target_scale.std)
    rows = {name: np.array([float(row[name]) for row in rows_of("p.csv")]) for name in rows_of("p.csv")[0]}
    np.testing.assert_allclose(rows["target"], raw.test_y[:, 0], rtol=1e-5)
    np.testing.assert_allclose(rows["mean"], data.target_scale.restore(wanted.mean)[:, 0], rtol=1e-5)
    np.testing.assert_allclose(rows["std"], wanted.variance[:, 0].sqrt() * unit, rtol=1e-4)
    np.testing.assert_allclose(rows["std"] ** 2, rows["aleatoric_std"] ** 2 + rows["epistemic_std"] ** 2, rtol=1e-5)
    np.testing.assert_allclose(rows["entropy"], 0.5 * np.log(2 * math.pi * math.e * rows["std"] ** 2), rtol=1e-5)
    np.save("x.npy", raw.test_x.double().numpy())
    assert call("predict", values, "--to", "own.csv", "--samples", 8, "--inputs", "x.npy") == 0
    own = np.array([float(row["mean"]) for row in rows_of("own.csv")])
    np.testing.assert_allclose(own, rows["mean"], rtol=1e-4)
    assert "target" not in rows_of("own.csv")[0]


@pytest.mark.parametrize("noise", [0.3, "heteroscedastic"])
def test_draws_and_intervals_are_converted_to_the_units_of_the_data(noise):
    likelihood, draws = bl.likelihoods.Gaussian(noise), torch.randn(5, 7, 2, dtype=torch.float64)
    standard = likelihood.predict(draws)
    scale = Scale(torch.tensor([1000.0]), torch.tensor([200.0]))
    found = in_units_of(standard, scale)
    for bound, wanted in zip(found.interval(0.8), standard.interval(0.8), strict=True):
        torch.testing.assert_close(bound, 1000 + 200 * wanted)
    if noise == "heteroscedastic":
        again = likelihood.predict(found.samples)
        for name in ("mean", "aleatoric", "epistemic"):
            torch.testing.assert_close(getattr(found, name), getattr(again, name))
    else:
        torch.testing.assert_close(found.samples, 1000 + 200 * draws)


def test_numbers_are_written_with_all_their_digits(tmp_path):
    large = torch.tensor([[1_700_000_060.0], [0.1]], dtype=torch.float64)
    prediction = Prediction("values", large, large[None], large, large)
    write_prediction(prediction, large, tmp_path / "large.csv")
    assert [(row["mean"], row["target"]) for row in rows_of(tmp_path / "large.csv")] == [
        ("1700000060",) * 2,
        ("0.1",) * 2,
    ]
    single = torch.tensor([[16777213.0], [0.1]])
    write_prediction(Prediction("values", single, single[None], single, single), None, tmp_path / "single.csv")
    assert [row["mean"] for row in rows_of(tmp_path / "single.csv")] == ["16777213", "0.1"]


def test_images_in_a_file_are_taken_as_they_are(classes, tmp_path):
    digits = bl.data.load("digits")
    np.save("x.npy", digits.test_x[:7].numpy())
    assert call("predict", classes, "--to", "p.npz", "--samples", 8, "--inputs", "x.npy") == 0
    np.testing.assert_allclose(
        np.load("p.npz")["probability"], by_python(classes, digits.test_x[:7]).probs, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (None, "Could not read x.npy: No such file"),
        (b"not an array", "is no .npy file of numbers"),
        (b"", "is no .npy file of numbers"),
        (np.array([{"a": 1}]), "is no .npy file of numbers"),
        (np.array(["text"]), "must hold one array of numbers"),
        (np.zeros((0, 1, 8, 8)), "with a row for each example"),
        (np.array(3.0), "with a row for each example"),
        (np.zeros((2, 1, 8, 8), np.uint8), "holds bytes"),
        (np.full((2, 1, 8, 8), np.nan), "holds NaN or infinity"),
        (np.zeros((2, 3)), "does not run on x.npy, whose inputs are 3:"),
    ],
)
def test_bad_files_of_inputs_are_refused(classes, capsys, tmp_path, array, message):
    if isinstance(array, bytes):
        (tmp_path / "x.npy").write_bytes(array)
    elif array is not None:
        np.save("x.npy", array, allow_pickle=array.dtype == object)
    assert call("predict", classes, "--to", "p.csv", "--inputs", "x.npy") == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "p.csv").exists()


def test_inputs_of_a_regression_need_its_features(values, with_yacht, capsys):
    np.save("x.npy", np.zeros((4, 5)))
    assert call("predict", values, "--to", "p.csv", "--inputs", "x.npy") == 1
    assert "examples of 6 features, (N, 6). Got an array of shape (4, 5)" in capsys.readouterr().err


def test_what_does_not_fit_in_a_row_is_refused_and_the_file_before_is_kept(tmp_path):
    likelihood = bl.likelihoods.Categorical(class_dim=1)
    many = likelihood.predict(torch.randn(4, 3, 5, 2, 2))
    file = tmp_path / "p.csv"
    file.write_text("before")
    with pytest.raises(ValueError, match=r"do not fit in a row. Write .*p.npz"):
        write_prediction(many, None, file)
    assert file.read_text() == "before"
    write_prediction(many, None, tmp_path / "p.npz")
    assert np.load(tmp_path / "p.npz")["probability"].shape == (3, 2, 2, 5)


def test_yes_and_no_and_several_values_have_columns_of_their_own(tmp_path):
    write_prediction(bl.likelihoods.Bernoulli().predict(torch.tensor([[2.0, -1.0]])), None, tmp_path / "b.csv")
    yes, no = rows_of(tmp_path / "b.csv")
    assert (yes["class"], no["class"]) == ("1", "0")
    assert float(no["confidence"]) == pytest.approx(1 - float(no["probability"]), rel=1e-6)
    write_prediction(bl.likelihoods.Bernoulli().predict(torch.tensor([[[2.0], [-1.0]]])), None, tmp_path / "one.csv")
    assert float(rows_of(tmp_path / "one.csv")[0]["probability"]) > 0.5
    write_prediction(bl.likelihoods.Gaussian(0.5).predict(torch.randn(4, 3, 2)), None, tmp_path / "g.csv")
    assert {"mean_0", "mean_1", "std_0", "std_1"} <= rows_of(tmp_path / "g.csv")[0].keys()


def test_predictions_do_not_depend_on_how_the_data_are_cut(classes, monkeypatch):
    bnn, digits = bl.load(classes / "network"), bl.data.load("digits")
    whole = predict_batches(bnn, [(digits.test_x, digits.test_y)], 4, "auto", 3)
    monkeypatch.setattr("bayeslim.app.cli.predicting.EXAMPLES_PER_GROUP", 100)
    cut = predict_batches(bnn, list(zip(digits.test_x.split(60), digits.test_y.split(60), strict=True)), 4, "auto", 3)
    for name in (field.name for field in dataclasses.fields(Prediction) if field.name != "kind"):
        torch.testing.assert_close(getattr(cut, name), getattr(whole, name))


OTHERS = """
import torch
import bayeslim as bl

def noise():
    x = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    loader = bl.data.Loader(x, torch.zeros(60, dtype=torch.long), shuffle=False)
    return loader, loader

def wide():
    loader = bl.data.Loader(torch.rand(6, 1, 9, 9), torch.zeros(6, dtype=torch.long))
    return loader, loader
"""


@pytest.fixture
def others(tmp_path, monkeypatch):
    (tmp_path / "other_data.py").write_text(OTHERS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("other_data", None)


def test_an_evaluation_is_that_of_the_metrics(classes, others, capsys):
    words = ("--against", "other_data:noise", "--samples", 8, "--json", "scores.json")
    assert call("evaluate", classes, *words) == 0
    shown = capsys.readouterr().out
    for part in ("digits, test part: 500 examples", "Brier", "ECE", "mean network", "posterior", "other_data:noise"):
        assert part in shown
    found = json.loads(Path("scores.json").read_text())
    digits = bl.data.load("digits")
    wanted = by_python(classes, digits.test_x)
    assert found["posterior"] == pytest.approx(
        {
            "error": bl.metrics.error(wanted.probs, digits.test_y),
            "nll": bl.metrics.nll(wanted.probs, digits.test_y),
            "brier": bl.metrics.brier(wanted.probs, digits.test_y),
            "ece": bl.metrics.expected_calibration_error(wanted.probs, digits.test_y),
        },
        rel=1e-4,
    )
    mean = by_python(classes, digits.test_x, how="mean")
    assert found["mean_network"]["nll"] == pytest.approx(bl.metrics.nll(mean.probs, digits.test_y), rel=1e-5)
    noise = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    outside = by_python(classes, noise)
    assert found["auroc_against"]["other_data:noise"] == pytest.approx(
        {
            "entropy": bl.metrics.auroc(wanted.entropy, outside.entropy),
            "epistemic": bl.metrics.auroc(wanted.epistemic, outside.epistemic),
        },
        abs=1e-3,
    )
    assert (found["data"], found["part"], found["examples"], found["samples"]) == ("digits", "test", 500, 8)


def test_an_evaluation_of_values_is_in_their_units(values, with_yacht, capsys):
    assert call("evaluate", values, "--samples", 8, "--json", "scores.json") == 0
    assert "RMSE" in capsys.readouterr().out
    found = json.loads(Path("scores.json").read_text())["posterior"]
    data, raw = bl.data.load("yacht"), bl.data.load("yacht", scaled=False)
    wanted = by_python(values, data.test_x)
    mean, variance = data.target_scale.restore(wanted.mean), wanted.variance * data.target_scale.std**2
    assert found["rmse"] == pytest.approx(bl.metrics.rmse(mean, raw.test_y), rel=1e-4)
    assert found["nll"] == pytest.approx(bl.metrics.gaussian_nll(mean, variance, raw.test_y), rel=1e-4)
    assert found["rmse"] < 0.5 * float(raw.test_y.std()), "it learned something"


def test_a_network_saved_in_python_needs_its_data_named(tmp_path, capsys, classes):
    bnn = bl.load(classes / "network")
    bl.save(bnn, "saved")
    assert call("evaluate", "saved") == 1
    assert "pass --data NAME" in capsys.readouterr().err
    assert call("predict", "saved", "--to", "p.csv") == 1
    assert "pass --data NAME, or --inputs FILE.npy" in capsys.readouterr().err
    assert call("evaluate", "saved", "--data", "digits") == 0
    assert call("prune", classes, "--out", "pruned", "--sparsity", 0.5) == 0
    assert call("evaluate", "pruned", "--data", "digits") == 0


def test_settings_in_a_folder_are_never_imported(classes, tmp_path, capsys, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    bl.save(bl.load(classes / "network"), tmp_path / "run" / "network")
    (tmp_path / "run" / "fit.toml").write_text('model = "trap:build"\ndata = "trap:loaders"\n')
    assert call("evaluate", "run") == 1
    shown = capsys.readouterr().err
    assert "--data package.module:name" in shown
    assert "trap" not in shown
    assert call("evaluate", "run", "--data", "digits") == 0
    assert "trap" not in sys.modules


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict", "nowhere", "--to", "p.csv"), "nowhere does not exist"),
        (("predict", "{run}", "--to", "p.txt"), "must end in .csv or .npz"),
        (("predict", "{run}", "--to", "p.csv", "--how", "magic"), "how must be one of auto, sample"),
        (("predict", "{run}", "--to", "p.csv", "--device", "abacus"), "torch finds no such device"),
        (("predict", "{run}", "--to", "p.csv", "--data", "yacht"), "does not run on yacht, whose inputs are 6:"),
        (("predict", "{run}", "--to", "file/p.csv"), "Could not write file/p.csv"),
        (("evaluate", "empty"), "holds no bayeslim.json"),
        (("evaluate", "compressed"), "is a run of compress: name a network in it"),
        (("evaluate", "plain"), "plain holds a plain network"),
        (("evaluate", "{run}", "--against", "minst"), 'Closest: "mnist"'),
        (("evaluate", "{run}", "--against", "other_data:wide"), "other_data:wide, whose inputs are 1x9x9"),
        (("evaluate", "{values}", "--data", "digits"), "does not run on digits"),
        (("evaluate", "six", "--data", "yacht"), "predicts classes, and the targets of these data are values"),
    ],
)  # fmt: skip
def test_mistakes_get_one_line(classes, values, with_yacht, others, tmp_path, capsys, words, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "compressed").mkdir()
    (tmp_path / "compressed" / "run.toml").write_text("")
    bl.save(bl.zoo.create("mlp", hidden=3, inputs=64), "plain")
    six = bl.zoo.create("mlp", hidden=3, inputs=6)
    bl.save(bl.bayesianize(six, bl.Variational(), likelihood=bl.likelihoods.Categorical()), "six")
    named = {"{run}": str(classes), "{values}": str(values)}
    assert call(*[named.get(word, word) for word in words]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert not list(tmp_path.glob("p.*"))


def test_usage_errors_name_the_flag(classes, capsys):
    assert call("predict", classes, "--interval", "wide") == 2
    assert "--interval" in capsys.readouterr().err
    assert call("evaluate", classes, "--samples", 0) == 2
    assert "--samples" in capsys.readouterr().err


def test_networks_of_ones_own_classes(tmp_path, capsys, monkeypatch):
    (tmp_path / "own_nets_here.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    bl.save(bl.bayesianize(own, bl.Variational(), likelihood=bl.likelihoods.Categorical()), "own")
    assert call("predict", "own", "--data", "digits", "--to", "p.csv") == 1
    assert "not its code: name its factory with --model package.module:name" in capsys.readouterr().err
    assert call("predict", "own", "--data", "digits", "--to", "p.csv", "--model", "own_nets_here:build") == 0
    sys.modules.pop("own_nets_here")
