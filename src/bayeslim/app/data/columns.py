"""Columns of tables: what is learned of their cells in the training data, and how cells become numbers."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, Self

import torch
from torch import Tensor

from bayeslim.app.data.cells import BadTable, check_told, is_missing, not_numbers, number_in
from bayeslim.errors import BayeslimWarning
from bayeslim.train.dataset import Scale

MAX_CATEGORIES = 200
"""The most categories of an input; a column with more is probably a name or a number of the row."""

MOSTLY_NUMBERS = 0.9
"""The part of the cells that are numbers from which the others are probably mistakes."""

TARGET_ADVICE = "Fill them in, or remove these rows."
MEND = "Mend the cell if it is a mistake."
INPUT_ADVICE = f"{MEND[:-1]}, or leave it empty and pass --missing impute."
CLASSES_ADVICE = "If the column holds classes, pass --likelihood categorical."

Kind = Literal["values", "counts", "binary", "classes"]
"""What a target holds, by the names of `Prediction.kind`."""


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
        """Learn how to read a column from its cells in the training data.

        A column of numbers with a few other cells is one of categories, with a warning.
        """
        told = [cell for cell in cells if not is_missing(cell)]
        if not told:
            raise BadTable(f'Column "{name}" has no values. Leave it out: --drop "{name}".')
        had_missing, odd = len(told) < len(cells), not_numbers(cells)
        if odd:
            categories = tuple(sorted(set(told)))
            if len(categories) > MAX_CATEGORIES:
                raise BadTable(
                    f'Column "{name}" has {len(categories):,} categories, more than {MAX_CATEGORIES}. '
                    f'{_odd_cell(cells, odd, INPUT_ADVICE)}If it names the rows, leave it out: --drop "{name}".'
                )
            if _are_mostly_numbers(told, odd):
                warnings.warn(
                    f'Column "{name}" is read as {len(categories)} categories. {_odd_cell(cells, odd, INPUT_ADVICE)}',
                    BayeslimWarning,
                    stacklevel=4,
                )
            return cls(name, had_missing=had_missing, categories=categories)
        values = torch.tensor([number_in(cell) for cell in told], dtype=torch.float64)
        scale = Scale.of(values[:, None])
        return cls(name, float(scale.mean), float(scale.std), statistics.median(values.tolist()), had_missing)

    @classmethod
    def of_target(cls, name: str, cells: Sequence[str], kind: Kind | None = None) -> Self:
        """Learn how to read a target from its cells in the training data.

        Only values are standardised.

        Args:
            name: in the header.
            cells: its cells.
            kind: what it holds; None for values if all cells are numbers, and else for classes.
        """
        check_told(name, cells, TARGET_ADVICE)
        kind = kind or _guessed_kind(name, cells)
        if kind == "classes":
            return cls(name, categories=_labels(cells))
        plain = cls(name)
        for row, cell in enumerate(cells):
            number = plain._number(row, cell, CLASSES_ADVICE)
            if kind == "counts" and (number < 0 or number != int(number)):
                raise BadTable(f'Column "{name}" needs counts: 0, 1, 2, and so on. Row {row + 1} has {cell!r}.')
            if kind == "binary" and number not in (0, 1):
                raise BadTable(
                    f'Column "{name}" needs 0 or 1. Row {row + 1} has {cell!r}. For other labels pass '
                    "--likelihood categorical."
                )
        return cls.of(name, cells) if kind == "values" else plain

    def encode(self, cells: Sequence[str]) -> Tensor:
        """Convert cells to inputs, (N, width).

        A category that the training data do not have gets zeros everywhere, and a warning.
        """
        if self.categories is None:
            numbers = [None if is_missing(cell) else self._number(row, cell) for row, cell in enumerate(cells)]
            filled = [self.median if number is None else number for number in numbers]
            inputs = [(torch.tensor(filled, dtype=torch.float64) - self.mean) / self.std]
            inputs += [torch.tensor([number is None for number in numbers]).double()] if self.had_missing else []
            return torch.stack(inputs, 1)
        places = {category: place for place, category in enumerate(self.categories)}
        found = torch.zeros(len(cells), len(places), dtype=torch.float64)
        unknown = set()
        for row, cell in enumerate(cells):
            if cell in places:
                found[row, places[cell]] = 1
            elif not is_missing(cell):
                unknown.add(cell)
        if unknown:
            warnings.warn(
                f'Column "{self.name}" has categories that the training data do not have: '
                f"{', '.join(sorted(unknown)[:3])}{' and more' if len(unknown) > 3 else ''}. They count as none.",
                BayeslimWarning,
                stacklevel=4,
            )
        return found

    def encode_target(self, cells: Sequence[str]) -> Tensor:
        """Convert a target to class indices (N,), or to float64 numbers (N, 1)."""
        check_told(self.name, cells, TARGET_ADVICE)
        if self.categories is None:
            return Column(self.name, self.mean, self.std).encode(cells)
        are_numbers = not not_numbers(self.categories)
        places = {_key(category, are_numbers): place for place, category in enumerate(self.categories)}
        unknown = sorted({cell for cell in cells if _key(cell, are_numbers) not in places})
        if unknown:
            raise BadTable(f'Column "{self.name}" has a class that the training data do not have: {unknown[0]}.')
        return torch.tensor([places[_key(cell, are_numbers)] for cell in cells])

    def _number(self, row: int, cell: str, advice: str = "") -> float:
        number = number_in(cell)
        if number is None:
            raise BadTable(f'Column "{self.name}" needs numbers. Row {row + 1} has {cell!r}. {advice}'.rstrip())
        return number


def _guessed_kind(name: str, cells: Sequence[str]) -> Kind:
    """Guess what a target holds: values if all cells are numbers, or else classes."""
    odd, count = not_numbers(cells), len(set(cells))
    if not odd:
        return "values"
    if _are_mostly_numbers(cells, odd):
        raise BadTable(f'Column "{name}" must hold numbers, or classes. {_odd_cell(cells, odd, MEND)}{CLASSES_ADVICE}')
    if count > min(MAX_CATEGORIES, len(cells) / 2):
        raise BadTable(
            f'Column "{name}" has {count:,} classes in {len(cells):,} rows: more than {MAX_CATEGORIES}, or than half '
            f"the rows. Row {odd[0] + 1} has {cells[odd[0]]!r}, which is no number. {MEND} {CLASSES_ADVICE}"
        )
    return "classes"


def _are_mostly_numbers(told: Sequence[str], odd: Sequence[int]) -> bool:
    return len(told) - len(odd) >= MOSTLY_NUMBERS * len(told)


def _odd_cell(cells: Sequence[str], odd: Sequence[int], advice: str) -> str:
    """Name the first cell that is no number, where at least half of them are."""
    told = sum(not is_missing(cell) for cell in cells)
    if 2 * len(odd) > told:
        return ""
    first = odd[0]
    return f"{told - len(odd):,} of its {told:,} cells are numbers, and row {first + 1} has {cells[first]!r}. {advice} "


def _labels(cells: Sequence[str]) -> tuple[str, ...]:
    """List the classes, in order.

    If all labels are numbers they count by value: 1 and 1.0 are one class, by its shortest name.
    """
    found = sorted(set(cells), key=lambda cell: (len(cell), cell))
    are_numbers = not not_numbers(found)
    names: dict[Decimal | str, str] = {}
    for cell in found:
        names.setdefault(_key(cell, are_numbers), cell)
    return tuple(sorted(names.values(), key=Decimal if are_numbers else None))


def _key(cell: str, as_number: bool) -> Decimal | str:
    return Decimal(cell) if as_number and number_in(cell) is not None else cell
