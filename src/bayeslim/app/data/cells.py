"""Tables in files, cell by cell: how they are read, and which cells hold numbers."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bayeslim.errors import BayeslimError, closest

SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Endings of tables, and what stands between their cells."""

MISSING_CELLS = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Cells without a value, in lower case."""


class BadTable(BayeslimError, ValueError):
    """A table that cannot be read, or does not fit the network."""


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


def check_name(name: str, table: Mapping[str, Any]) -> None:
    """Refuse a column that the table does not have."""
    if name not in table:
        hint = closest(name, table)
        raise BadTable(
            f'The table has no column "{name}".{f" Closest: {hint}." if hint else ""} It has: {", ".join(table)}.'
        )


def check_told(name: str, cells: Sequence[str], advice: str) -> None:
    """Refuse a column with cells that have no value."""
    missing = [row for row, cell in enumerate(cells) if is_missing(cell)]
    if missing:
        raise BadTable(
            f'Column "{name}" has no value in {len(missing):,} of {len(cells):,} rows, the first of them row '
            f"{missing[0] + 1}. {advice}"
        )


def is_missing(cell: str) -> bool:
    """Tell whether a cell has no value."""
    return cell.lower() in MISSING_CELLS


def number_in(cell: str) -> float | None:
    """Read a finite number; None if the cell holds none."""
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in cell else None  # Python reads 1_2 as 12


def not_numbers(cells: Sequence[str]) -> list[int]:
    """List the rows whose cells have a value that is no number."""
    return [row for row, cell in enumerate(cells) if not is_missing(cell) and number_in(cell) is None]
