"""Tables in files: `bayeslim fit --data table.csv --target price`, and predictions of new rows."""

from __future__ import annotations

import csv
import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typed_commands import call

import bayeslim as bl
from bayeslim.app.cli.fitting import KINDS
from bayeslim.app.data.cells import BadTable, read_table
from bayeslim.app.data.tables import TableRules
from bayeslim.errors import BayeslimWarning

QUICK = ("--epochs", 30, "--validation", 0.2)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


def write(path: Path, header: list[str], rows: list[list[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([header, *rows])
    return path


def houses(rows: int, seed: int, holes: float = 0.0) -> list[list[Any]]:
    """Draw houses whose price follows from their size and their town."""
    draw, extra = random.Random(seed), {"Ulm": 0, "Bonn": 50_000, "Köln": 120_000}
    found = []
    for number in range(rows):
        size, town = draw.uniform(40, 200), draw.choice(list(extra))
        price = 1000 * size + extra[town] + draw.gauss(0, 5000)
        found.append([number, "" if draw.random() < holes else f"{size:.1f}", town, f"{price:.0f}"])
    return found


HEADER = ["id", "size", "town", "price"]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a network fitted to houses."""
    folder = tmp_path_factory.mktemp("houses")
    table = write(folder / "houses.csv", HEADER, houses(150, 0))
    assert call("fit", "--data", table, "--target", "price", "--drop", "id", *QUICK, "--out", folder / "run") == 0
    return folder / "run"


def test_new_rows_are_predicted_in_the_units_of_the_table(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = write(Path("new.csv"), HEADER, houses(100, 1))
    assert call("predict", fitted, new, "--interval", 0.9) == 0
    rows = read(Path("new-predictions.csv"))
    assert len(rows) == 100
    off = [float(row["mean"]) - float(row["target"]) for row in rows]
    assert (sum(x * x for x in off) / 100) ** 0.5 < 12_000  # prices are 40,000 to 320,000
    covered = sum(float(row["lower"]) <= float(row["target"]) <= float(row["upper"]) for row in rows)
    assert covered >= 80
    capsys.readouterr()
    assert call("evaluate", fitted, "--data", new) == 0
    assert "100 examples" in capsys.readouterr().out


def test_new_rows_need_no_target_and_no_order_of_columns(fitted: Path) -> None:
    write(Path("new.csv"), ["town", "size"], [["Ulm", 100], ["Köln", 100]])
    assert call("predict", fitted, "new.csv", "--to", "out.csv") == 0
    low, high = (float(row["mean"]) for row in read(Path("out.csv")))
    assert 60_000 < high - low < 180_000
    assert "lower" not in read(Path("out.csv"))[0]


def test_classes_keep_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    rows = [[x := draw.gauss(0, 1), draw.gauss(0, 1), "high" if x > 0 else "low"] for _ in range(120)]
    write(Path("t.tsv"), ["a", "b", "kind"], rows)
    assert call("fit", "--data", "t.tsv", "--target", "kind", *QUICK, "--out", "run") == 0
    write(Path("new.csv"), ["a", "b"], [[3, 0], [-3, 0]])
    assert call("predict", "run", "new.csv", "--to", "out.csv") == 0
    found = read(Path("out.csv"))
    assert [row["class"] for row in found] == ["high", "low"]
    assert float(found[0]["probability_high"]) > 0.9
    assert call("predict", "run", "new.csv", "--interval", 0.9) == 1
    assert "predicts classes" in capsys.readouterr().err
    assert call("predict", "run") == 1
    assert "Name a table" in capsys.readouterr().err
    assert call("predict", "run", "--to", "out.csv") == 1  # a folder does not choose the file to read
    assert "--data FILE.csv" in capsys.readouterr().err


def test_numbers_may_be_classes_by_choice() -> None:
    rules = TableRules.learn({"x": ["1", "2", "3"], "y": ["10", "9", "10"]}, "y", kind="classes")
    assert rules.target.categories == ("9", "10")
    assert rules.targets({"y": ["10", "9"]}).tolist() == [1, 0]


def test_missing_cells_are_refused_or_imputed(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("holes.csv"), HEADER, houses(80, 0, holes=0.2))
    words = ("fit", "--data", "holes.csv", "--target", "price", "--drop", "id", "--epochs", 2)
    assert call(*words, "--out", "a") == 1
    assert "--missing impute" in capsys.readouterr().err
    assert call(*words, "--missing", "impute", "--out", "b") == 0
    write(Path("new.csv"), ["size", "town"], [["", "Ulm"], ["100", ""]])
    assert call("predict", "b", "new.csv") == 0
    assert len(read(Path("new-predictions.csv"))) == 2


@pytest.mark.filterwarnings("always")
def test_a_warning_is_one_line_without_a_place_in_the_code(fitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = []  # pytest collects warnings; Python prints them in this format

    def show(message: Warning, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        printed.append(warnings.formatwarning(message, category, filename, lineno))

    monkeypatch.setattr(warnings, "showwarning", show)
    table = write(Path("new.csv"), HEADER, [[1, 80, "Rome\nby \x1b[31m the sea", 0]])
    assert call("predict", fitted, table) == 0
    (line,) = printed
    assert line.startswith('Warning: Column "town" has categories that the training data do not have: Rome by ')
    assert line.endswith(" \N{REPLACEMENT CHARACTER}[31m the sea. They count as none.\n")


def test_imputed_inputs() -> None:
    table = {"x": ["1", "NA", "3", "8"], "c": ["a", "b", "", "a"], "y": ["1", "2", "3", "4"]}
    rules = TableRules.learn(table, "y", "impute")
    x = rules.inputs(table)
    mean, std = 4.0, (26 / 3) ** 0.5
    torch.testing.assert_close(x[:, 0], (torch.tensor([1.0, 3.0, 3.0, 8.0]) - mean) / std)  # the median is 3
    assert x[:, 1].tolist() == [0, 1, 0, 0]
    assert x[:, 2:].tolist() == [[1, 0], [0, 1], [0, 0], [1, 0]]
    assert TableRules.from_json(rules.to_json()) == rules
    with pytest.warns(bl.errors.BayeslimWarning, match="do not have: z"):
        assert rules.inputs({"x": ["1"], "c": ["z"]})[0, 2:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,b\n1,2\n3\n", "row 3: 1 cells"),
        ("a,a\n1,2\n", "different name"),
        ("a,b\n", "at least one row"),
        ("a,b\n1,x\n2,y\n", 'no column "y"'),
        ("y\n1\n2\n", "beside the target"),
        ("y,a\n1,\n2,\n", "has no values"),
        ("y,a\n,1\n2,2\n", 'Column "y" has no value in 1 of 2 rows'),
    ],
)
def test_bad_tables_say_what_is_wrong(content: str, words: str) -> None:
    Path("t.csv").write_text(content)
    with pytest.raises(BadTable, match=words):
        TableRules.learn(read_table(Path("t.csv")), "y")


def test_bad_commands_say_what_is_needed(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (("fit", "--data", "t.csv"), "--target NAME"),
        (("fit", "--data", "digits", "--model", "mlp", "--target", "x"), "are for tables"),
        (("fit", "--data", "none.csv", "--target", "x"), "Could not read none.csv"),
        (("predict", fitted, "none.csv"), "Could not read none.csv"),
        (("predict", fitted, "none.csv", "--interval", "2"), "between 0 and 1"),
        (("predict", fitted, "none.csv", "--data", "digits"), "Got several"),
    ):
        assert call(*words) == 1
        assert said in " ".join(capsys.readouterr().err.split())
    with pytest.raises(bl.errors.CorruptFile, match="no rules"):
        TableRules.from_json('{"columns": []}')
    many = {"name": [f"n{i}" for i in range(300)], "y": ["1"] * 300}
    with pytest.raises(BadTable, match="300 categories"):
        TableRules.learn(many, "y")


@pytest.mark.parametrize("change", ["other prices", "prices in another unit", "other names of towns"])
def test_a_folder_of_a_fit_to_another_table_is_refused(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = houses(60, 0)
    words = ("fit", "--data", write(Path("t.csv"), HEADER, rows), "--target", "price", "--drop", "id", "--epochs", 2)
    assert call(*words, "--out", "run") == 0
    before = Path("run/table.json").read_bytes()
    for row in rows:
        if change == "other names of towns":
            row[2] = row[2].upper()
        else:
            row[3] = str(float(row[3]) * 2 if change == "prices in another unit" else 300_000 - float(row[3]))
    write(Path("t.csv"), HEADER, rows)
    capsys.readouterr()
    assert call(*words, "--out", "run") == 1
    assert "run holds another run: its content of the data was 60 rows (content " in capsys.readouterr().err
    assert Path("run/table.json").read_bytes() == before


def test_a_folder_of_a_fit_to_another_column_that_is_not_read_goes_on() -> None:
    rows = houses(60, 0)
    words = ("fit", "--data", "t.csv", "--target", "price", "--drop", "id", "--epochs", 2, "--out", "run")
    for first in (0, 1000):
        write(Path("t.csv"), HEADER, [[first + row[0], *row[1:]] for row in rows])
        assert call(*words) == 0


def test_large_numbers_keep_their_digits() -> None:
    times = [1_700_000_000 + 60 * step for step in range(20)]
    prices = [100_000_000 + step % 7 for step in range(20)]
    table = {"time": [str(time) for time in times], "price": [str(price) for price in prices]}
    rules = TableRules.learn(table, "price")
    steps = torch.arange(20.0)
    torch.testing.assert_close(rules.inputs(table)[:, 0], (steps - steps.mean()) / steps.std(correction=0))
    scale = rules.target_scale
    assert scale is not None
    assert scale.restore(rules.targets(table))[:, 0].round(decimals=6).tolist() == prices
    again = TableRules.from_json(rules.to_json())
    assert torch.equal(again.inputs(table), rules.inputs(table))


def test_predictions_of_large_numbers_keep_their_digits() -> None:
    rows = [[f"{step / 10}", f"{100_000_000 + step / 4}"] for step in range(60)]
    write(Path("t.csv"), ["x", "y"], rows)
    words = ("--method", "deep_ensemble(members=2)", "--epochs", 20, "--lr", 0.05)
    assert call("fit", "--data", "t.csv", "--target", "y", *words, "--out", "run") == 0
    assert call("predict", "run", "t.csv", "--interval", 0.9) == 0
    found = read(Path("t-predictions.csv"))
    assert [float(row["target"]) for row in found] == [float(y) for _, y in rows]
    assert len({row["mean"] for row in found}) == 60
    assert all(float(row["lower"]) < float(row["mean"]) < float(row["upper"]) for row in found)
    assert max(abs(float(row["mean"]) - float(row["target"])) for row in found) < 5


def events(rows: int) -> list[list[Any]]:
    """Draw inputs with a count, a yes or no, and a value with more noise to one side."""
    draw, found = random.Random(0), []
    for _ in range(rows):
        x = draw.uniform(-2, 2)
        count = sum(draw.random() < math.exp(x) / 20 for _ in range(20))
        found.append([f"{x:.3f}", count, int(x > 0), f"{1000 + 100 * x + (x + 2) * draw.gauss(0, 20):.2f}"])
    return found


@pytest.mark.parametrize(
    ("likelihood", "target", "column", "least", "most"),
    [
        ("poisson", "count", "mean", 0, 20),
        ("bernoulli", "flag", "probability", 0, 1),
        ("categorical", "flag", "probability_1", 0, 1),
        ('gaussian(noise="learned")', "value", "mean", 600, 1400),
        ('gaussian(noise="heteroscedastic")', "value", "mean", 600, 1400),
    ],
)
def test_every_likelihood_learns_from_a_table(
    likelihood: str, target: str, column: str, least: float, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["x", "count", "flag", "value"]
    drop = [word for name in names[1:] if name != target for word in ("--drop", name)]
    write(Path("t.csv"), names, events(150))
    words = ("--data", "t.csv", "--target", target, *drop, "--likelihood", likelihood, "--epochs", 40)
    assert call("fit", *words, "--out", "run") == 0
    write(Path("new.csv"), ["x"], [["-1.5"], ["1.5"]])
    interval = () if target == "flag" else ("--interval", 0.9)
    assert call("predict", "run", "new.csv", *interval) == 0
    low, high = read(Path("new-predictions.csv"))
    assert least <= float(low[column]) < float(high[column]) <= most
    if target == "flag":
        assert (low["class"], high["class"]) == ("0", "1")
    else:
        assert all(float(row["lower"]) <= float(row["mean"]) <= float(row["upper"]) for row in (low, high))
    if "heteroscedastic" in likelihood:
        assert float(low["aleatoric_std"]) < float(high["aleatoric_std"])
    capsys.readouterr()
    assert call("evaluate", "run", "--data", "t.csv") == 0
    assert "150 examples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("likelihood", "cells", "words"),
    [
        ("poisson", ["0", "1.5", "2"], r"needs counts: 0, 1, 2, and so on. Row 2 has '1.5'"),
        ("poisson", ["0", "1", "-2"], r"needs counts: 0, 1, 2, and so on. Row 3 has '-2'"),
        ("bernoulli", ["0", "1", "2"], r"needs 0 or 1. Row 3 has '2'. For other labels pass --likelihood categorical"),
        ("bernoulli", ["no", "yes", "no"], r"needs numbers. Row 1 has 'no'. If .* pass --likelihood categorical"),
        ("gaussian", ["1", "2", "many"], r"needs numbers. Row 3 has 'many'"),
    ],
)
def test_targets_that_a_likelihood_does_not_have_are_refused(likelihood: str, cells: list[str], words: str) -> None:
    with pytest.raises(BadTable, match=f'Column "y" {words}'):
        TableRules.learn({"x": ["1", "2", "3"], "y": cells}, "y", kind=KINDS[likelihood])


def test_counts_below_zero_are_not_scored(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("t.csv"), ["x", "y"], [[step, step % 4] for step in range(20)])
    words = ("--data", "t.csv", "--target", "y", "--likelihood", "poisson", "--epochs", 2)
    assert call("fit", *words, "--out", "run") == 0
    write(Path("new.csv"), ["x", "y"], [[1, -1]])
    assert call("evaluate", "run", "--data", "new.csv") == 1
    assert "Poisson needs targets of at least 0" in capsys.readouterr().err


def test_a_network_of_ones_own_size_is_told_the_outputs_of_a_likelihood(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("t.csv"), ["x", "y"], [[step, step] for step in range(20)])
    words = ("--model", "mlp(inputs=1, classes=1)", "--likelihood", 'gaussian(noise="heteroscedastic")')
    assert call("fit", "--data", "t.csv", "--target", "y", *words) == 1
    assert "For t.csv it takes classes=2." in capsys.readouterr().err


@pytest.mark.filterwarnings("always")
def test_targets_that_cannot_be_read_do_not_stop_predictions(recwarn: pytest.WarningsRecorder) -> None:
    draw = random.Random(0)
    rows = [[x := draw.gauss(0, 1), "high" if x > 0 else "low"] for _ in range(60)]
    write(Path("t.csv"), ["x", "kind"], rows)
    assert call("fit", "--data", "t.csv", "--target", "kind", *QUICK, "--out", "run") == 0
    recwarn.clear()
    for cells, said in (
        (("", ""), None),
        (("high", ""), 'Column "kind" has no value in 1 of 2 rows'),
        (("high", "middle"), "has a class that the training data do not have: middle"),
    ):
        write(Path("new.csv"), ["x", "kind"], [["3", cells[0]], ["-3", cells[1]]])
        assert call("predict", "run", "new.csv") == 0
        found = read(Path("new-predictions.csv"))
        assert [row["class"] for row in found] == ["high", "low"]
        assert "target" not in found[0]
        shown = [str(warning.message) for warning in recwarn]
        assert [said in message and "without the targets" in message for message in shown] == [True] * (
            said is not None
        )
        recwarn.clear()


def test_a_pruned_network_predicts_tables(fitted: Path) -> None:
    assert call("prune", fitted, "--sparsity", 0.5, "--out", "cut") == 0
    write(Path("new.csv"), ["town", "size"], [["Ulm", "3"]])
    assert call("predict", "cut", "new.csv", "--interval", 0.9) == 0
    assert float(read(Path("new-predictions.csv"))[0]["mean"]) > 10_000  # in the units of the table


def test_missing_inputs_of_a_prediction_ask_for_another_fit(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("new.csv"), ["size", "town"], [["", "Ulm"]])
    assert call("predict", fitted, "new.csv") == 1
    assert "fit again with --missing impute" in capsys.readouterr().err


def test_a_network_of_a_table_is_cut_on_the_table(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(Path("held_out.csv"), HEADER, houses(60, 2))
    cut = ("--data", table, "--granularity", "unit", "--sparsity", 0.5, "--steps", 1)
    assert call("prune", fitted, *cut, "--out", "pruned") == 0
    assert call("evaluate", "pruned", "--data", table) == 0
    assert call("predict", "pruned", table) == 0
    assert len(read(Path("held_out-predictions.csv"))) == 60
    capsys.readouterr()
    assert call("prune", fitted, *cut, "--out", fitted) == 1
    assert "choose another folder" in capsys.readouterr().err
    assert call("compress", "--model", "mlp", "--data", table, "--sparsity", 0.5, "--out", "x") == 1
    assert "is a table: bayeslim fit" in capsys.readouterr().err


def test_a_mistake_in_a_target_of_numbers_is_named() -> None:
    for rows in (20, 300):
        cells = [f"{1.5 * row}" for row in range(rows - 1)] + ["1,200"]
        with pytest.raises(BadTable, match=f"row {rows} has '1,200'.*pass --likelihood categorical") as caught:
            TableRules.learn({"x": ["1"] * rows, "y": cells}, "y")
        assert "--drop" not in str(caught.value)
        assert TableRules.learn({"x": ["1"] * rows, "y": cells}, "y", kind="classes").outputs == rows
    for rows in (30, 300):
        cells = [f"{row},000" for row in range(rows)]
        with pytest.raises(BadTable, match=f"{rows} classes in {rows} rows.* '0,000', which is no number") as caught:
            TableRules.learn({"x": ["1"] * rows, "y": cells}, "y")
        assert "--drop" not in str(caught.value)


def test_a_mistake_in_an_input_of_numbers_is_named() -> None:
    cells = [f"{0.7 * row}" for row in range(299)] + ["-"]
    with pytest.raises(
        BadTable, match=r"299 of its 300 cells are numbers, and row 300 has '-'. Mend .*--missing impute"
    ):
        TableRules.learn({"x": cells, "y": ["1"] * 300}, "y")
    with pytest.warns(BayeslimWarning, match="read as 100 categories. 99 of its 100 cells .* row 100 has '-'"):
        TableRules.learn({"x": cells[-100:], "y": ["1"] * 100}, "y")


def test_an_underscore_makes_no_number() -> None:
    table = {"size": ["1_2", "3_4", "10_12", "1_2"], "y": ["1", "2", "3", "4"]}
    assert TableRules.learn(table, "y").columns[0].categories == ("10_12", "1_2", "3_4")


def test_classes_that_are_numbers_count_by_value() -> None:
    rules = TableRules.learn({"x": ["1"] * 4, "y": ["1.0", "0", "1", "0.50"]}, "y", kind="classes")
    assert rules.target.categories == ("0", "0.50", "1")
    assert rules.targets({"y": ["1.00", "0.5", "0.0", "1"]}).tolist() == [2, 1, 0, 2]
    large = TableRules.learn({"x": ["1"] * 2, "y": ["9007199254740993", "9007199254740992"]}, "y", kind="classes")
    assert large.outputs == 2
    with pytest.raises(BadTable, match="do not have: two"):
        rules.targets({"y": ["1", "two"]})
    mixed = TableRules.learn({"x": ["1"] * 3, "y": ["1", "1.0", "a"]}, "y", kind="classes")
    assert mixed.target.categories == ("1", "1.0", "a")
