"""Tables in files: columns of numbers and of categories become standardised inputs of a network.

    a column of numbers      one input, standardised; with imputation also one that says where it was missing
    a column of categories   one input for each category of the training data, 0 or 1
    a target of numbers      standardised; its predictions are given in its own units
    a target of text         classes

The rules are learned from the training table, and kept as JSON beside the network. A new table is read by the same.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bayeslim.errors import BayeslimError, BayeslimWarning, CorruptFile, closest
from bayeslim.train.dataset import Dataset, Scale

SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Endings of tables, and what stands between their cells."""

MISSING_CELLS = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Cells without a value, in lower case."""

MAX_CATEGORIES = 200
"""The most categories of an input; a column with more is probably a name or a number of the row."""

Missing = Literal["refuse", "impute"]


class BadTable(BayeslimError, ValueError):
    """A table that cannot be read, or does not fit the network."""


@dataclass(frozen=True)
class Column:
    """How a column becomes inputs.

    Attributes:
        name: in the header.
        mean: of numbers in the training data.
        std: of numbers in the training data; 1 for a constant column.
        median: of numbers, for cells without a value.
        had_missing: whether cells were missing in the training data.
        categories: in the training data; None for a column of numbers.
    """

    name: str
    mean: float = 0.0
    std: float = 1.0
    median: float = 0.0
    had_missing: bool = False
    categories: tuple[str, ...] | None = None

    @property
    def width(self) -> int:
        """The number of inputs."""
        return 1 + self.had_missing if self.categories is None else len(self.categories)

    @classmethod
    def of(cls, name: str, cells: Sequence[str]) -> Self:
        """Learn how to read a column from its cells in the training data."""
        told = [cell for cell in cells if not _is_missing(cell)]
        if not told:
            raise BadTable(f'Column "{name}" has no values. Leave it out: --drop "{name}".')
        numbers = [_number(cell) for cell in told]
        had_missing = len(told) < len(cells)
        if any(number is None for number in numbers):
            categories = tuple(sorted(set(told)))
            if len(categories) > MAX_CATEGORIES:
                raise BadTable(
                    f'Column "{name}" has {len(categories):,} categories, more than {MAX_CATEGORIES}. If it names the '
                    f'rows, leave it out: --drop "{name}".'
                )
            return cls(name, had_missing=had_missing, categories=categories)
        values = torch.tensor([number for number in numbers if number is not None], dtype=torch.float64)
        scale = Scale.of(values[:, None])
        return cls(name, float(scale.mean), float(scale.std), statistics.median(values.tolist()), had_missing)

    def encode(self, cells: Sequence[str]) -> Tensor:
        """Convert cells to inputs, (N, width).

        A category that the training data do not have gets zeros everywhere, and a warning.
        """
        if self.categories is None:
            numbers = [None if _is_missing(cell) else self._number(row, cell) for row, cell in enumerate(cells)]
            filled = torch.tensor([self.median if number is None else number for number in numbers]).double()
            inputs = [(filled - self.mean) / self.std]
            inputs += [torch.tensor([number is None for number in numbers]).double()] if self.had_missing else []
            return torch.stack(inputs, 1)
        places = {category: place for place, category in enumerate(self.categories)}
        found = torch.zeros(len(cells), len(places), dtype=torch.float64)
        unknown = set()
        for row, cell in enumerate(cells):
            if cell in places:
                found[row, places[cell]] = 1
            elif not _is_missing(cell):
                unknown.add(cell)
        if unknown:
            warnings.warn(
                f'Column "{self.name}" has categories that the training data do not have: '
                f"{', '.join(sorted(unknown)[:3])}{' and more' if len(unknown) > 3 else ''}. They count as none.",
                BayeslimWarning,
                stacklevel=4,
            )
        return found

    def _number(self, row: int, cell: str) -> float:
        number = _number(cell)
        if number is None:
            raise BadTable(f'Column "{self.name}" needs numbers. Row {row + 1} has {cell!r}.')
        return number


@dataclass(frozen=True)
class TableRules:
    """How a table becomes inputs and targets.

    Attributes:
        columns: of the inputs, in order.
        target: the column to predict; its categories are the classes.
        missing: whether cells without a value are refused, or imputed: the median of numbers, no category.
    """

    columns: tuple[Column, ...]
    target: Column
    missing: Missing

    @classmethod
    def learn(
        cls,
        table: Mapping[str, Sequence[str]],
        target: str,
        missing: Missing = "refuse",
        drop: Iterable[str] = (),
        is_class: bool = False,
    ) -> Self:
        """Learn the rules from a training table.

        Args:
            table: cells by column.
            target: the column to predict.
            missing: "refuse" or "impute".
            drop: columns to leave out.
            is_class: whether a target of numbers holds classes.
        """
        if missing not in ("refuse", "impute"):
            raise BadTable(f'missing must be "refuse" or "impute". Got "{missing}".')
        for name in (target, *drop):
            _check_name(name, table)
        _check_told(target, table[target])
        goal = Column.of(target, table[target])
        if is_class and goal.categories is None:
            goal = Column(target, categories=tuple(sorted(set(table[target]), key=float)))
        rest = [name for name in table if name != target and name not in set(drop)]
        if not rest:
            raise BadTable("The table needs at least one column beside the target.")
        rules = cls(tuple(Column.of(name, table[name]) for name in rest), goal, missing)
        rules.check(table)
        return rules

    @property
    def width(self) -> int:
        """The number of inputs of the network."""
        return sum(column.width for column in self.columns)

    @property
    def outputs(self) -> int:
        """The number of outputs of the network."""
        return 1 if self.target.categories is None else len(self.target.categories)

    @property
    def target_scale(self) -> Scale | None:
        """The scale of a target of numbers."""
        if self.target.categories is not None:
            return None
        return Scale(torch.tensor([self.target.mean]), torch.tensor([self.target.std]))

    def check(self, table: Mapping[str, Sequence[str]]) -> None:
        """Refuse a table without a column, or with cells that must not be missing."""
        for column in self.columns:
            _check_name(column.name, table)
            if self.missing == "refuse":
                _check_told(column.name, table[column.name], "Pass --missing impute to fill them in.")

    def inputs(self, table: Mapping[str, Sequence[str]]) -> Tensor:
        """Convert a table to inputs, (N, D)."""
        self.check(table)
        return torch.cat([column.encode(table[column.name]) for column in self.columns], 1).float()

    def targets(self, table: Mapping[str, Sequence[str]]) -> Tensor:
        """Convert the target to class indices (N,), or to standardised values (N, 1)."""
        cells = table[self.target.name]
        _check_told(self.target.name, cells)
        if self.target.categories is None:
            return Column(self.target.name, self.target.mean, self.target.std).encode(cells).float()
        places = {category: place for place, category in enumerate(self.target.categories)}
        unknown = sorted(set(cells) - places.keys())
        if unknown:
            raise BadTable(f'Column "{self.target.name}" has a class that the training data do not have: {unknown[0]}.')
        return torch.tensor([places[cell] for cell in cells])

    def dataset(self, table: Mapping[str, Sequence[str]], name: str) -> Dataset:
        """Convert a table to a data set without a test part."""
        x, y = self.inputs(table), self.targets(table)
        classes = None if self.target.categories is None else len(self.target.categories)
        return Dataset(name, x, y, x[:0], y[:0], classes, None, self.target_scale)

    def to_json(self) -> str:
        """Write the rules as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read rules that `to_json` wrote.

        Raises:
            CorruptFile: if they are not such rules.
        """
        try:
            found = json.loads(text)
            columns = tuple(_column(entry) for entry in found["columns"])
            missing = found["missing"]
            if not columns or missing not in ("refuse", "impute"):
                raise ValueError("it has no columns")
            return cls(columns, _column(found["target"]), missing)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise CorruptFile(f"These are no rules of a table: {error}.") from error


def is_table(name: str) -> bool:
    """Tell whether a name is that of a table."""
    return Path(name).suffix.lower() in SEPARATORS


def read_table(path: Path) -> dict[str, list[str]]:
    """Read a table with a header: its cells by column, without blanks around them."""
    separator = SEPARATORS.get(path.suffix.lower())
    if separator is None:
        raise BadTable(f"{path} must end in {' or '.join(SEPARATORS)}.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file, delimiter=separator) if row]
    except OSError as error:
        raise BadTable(f"Could not read {path}: {error.strerror or error}.") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadTable(f"{path} is no table of text: {error}.") from error
    if len(rows) < 2:
        raise BadTable(f"{path} needs a header and at least one row.")
    header, cells = rows[0], rows[1:]
    if len(set(header)) < len(header) or "" in header:
        raise BadTable(f"The header of {path} must have a different name for every column. Got {', '.join(header)}.")
    for number, row in enumerate(cells, 2):
        if len(row) != len(header):
            raise BadTable(f"{path}, row {number}: {len(row)} cells, and the header has {len(header)}.")
    return {name: list(column) for name, column in zip(header, zip(*cells, strict=True), strict=True)}


def _column(entry: Any) -> Column:
    found = dict(entry)
    categories = found.pop("categories")
    name, had_missing = str(found.pop("name")), bool(found.pop("had_missing"))
    numbers = {key: float(found[key]) for key in ("mean", "std", "median")}
    if not all(math.isfinite(number) for number in numbers.values()) or not numbers["std"] > 0:
        raise ValueError(f"the numbers of {name} are not finite")
    kept = None if categories is None else tuple(str(category) for category in categories)
    return Column(name, **numbers, had_missing=had_missing, categories=kept)


def _check_name(name: str, table: Mapping[str, Any]) -> None:
    if name not in table:
        hint = closest(name, table)
        raise BadTable(
            f'The table has no column "{name}".{f" Closest: {hint}." if hint else ""} It has: {", ".join(table)}.'
        )


def _check_told(name: str, cells: Sequence[str], advice: str = "Remove these rows.") -> None:
    missing = [row for row, cell in enumerate(cells) if _is_missing(cell)]
    if missing:
        raise BadTable(
            f'Column "{name}" has no value in {len(missing):,} of {len(cells):,} rows, the first of them row '
            f"{missing[0] + 1}. {advice}"
        )


def _is_missing(cell: str) -> bool:
    return cell.lower() in MISSING_CELLS


def _number(cell: str) -> float | None:
    """Read a finite number; None if the cell holds none."""
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
