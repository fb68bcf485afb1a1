"""Tables in files: `bayeslim fit --data table.csv --target price`, and predictions of new rows."""

from __future__ import annotations

import csv
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typed_commands import call

import bayeslim as bl
from bayeslim.app.data.tables import BadTable, TableRules, read_table

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
    assert call("predict", "run") == 2
    assert call("predict", "run", "--to", "out.csv") == 1  # a folder does not choose the file to read
    assert "--data FILE.csv" in capsys.readouterr().err


def test_numbers_may_be_classes_by_choice() -> None:
    rules = TableRules.learn({"x": ["1", "2", "3"], "y": ["10", "9", "10"]}, "y", is_class=True)
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
