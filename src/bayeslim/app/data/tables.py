"""Tables in files: columns of numbers and of categories become standardised inputs of a network.

    a column of numbers      one input, standardised; with imputation also one that says where it was missing
    a column of categories   one input for each category of the training data, 0 or 1
    a target of numbers      standardised; its predictions are given in its own units
    a target of text         classes

Counts, and yes or no as 1 or 0, are targets by choice, and are not standardised. Numbers may be classes by choice.

The rules are learned from the training table, and kept as JSON beside the network. A new table is read by the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bayeslim.app.data.cells import BadTable, check_name, check_told
from bayeslim.app.data.columns import Column, Kind
from bayeslim.errors import CorruptFile
from bayeslim.train.dataset import Dataset, Scale

Missing = Literal["refuse", "impute"]


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
        kind: Kind | None = None,
    ) -> Self:
        """Learn the rules from a training table.

        Args:
            table: cells by column.
            target: the column to predict.
            missing: "refuse" or "impute".
            drop: columns to leave out.
            kind: what the target holds; None for values if all its cells are numbers, and else for classes.
        """
        if missing not in ("refuse", "impute"):
            raise BadTable(f'missing must be "refuse" or "impute". Got "{missing}".')
        for name in (target, *drop):
            check_name(name, table)
        goal = Column.of_target(target, table[target], kind)
        rest = [name for name in table if name != target and name not in set(drop)]
        if not rest:
            raise BadTable("The table needs at least one column beside the target.")
        rules = cls(tuple(Column.of(name, table[name]) for name in rest), goal, missing)
        rules.check(table, "Pass --missing impute to fill them in.")
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
        """The scale of a target of numbers, float64."""
        if self.target.categories is not None:
            return None
        mean, std = torch.tensor([[self.target.mean], [self.target.std]], dtype=torch.float64)
        return Scale(mean, std)

    def check(self, table: Mapping[str, Sequence[str]], advice: str) -> None:
        """Refuse a table without a column, or with cells that must not be missing.

        The error ends with `advice`.
        """
        for column in self.columns:
            check_name(column.name, table)
            if self.missing == "refuse":
                check_told(column.name, table[column.name], advice)

    def inputs(self, table: Mapping[str, Sequence[str]]) -> Tensor:
        """Convert a table to inputs, (N, D)."""
        self.check(table, "Fill them in, or fit again with --missing impute.")
        return torch.cat([column.encode(table[column.name]) for column in self.columns], 1).float()

    def targets(self, table: Mapping[str, Sequence[str]]) -> Tensor:
        """Convert the target to class indices (N,), or float64 numbers (N, 1)."""
        return self.target.encode_target(table[self.target.name])

    def dataset(self, table: Mapping[str, Sequence[str]], name: str) -> Dataset:
        """Convert a table to a data set without a test part."""
        x, y = self.inputs(table), self.targets(table)
        y, classes = (y.float(), None) if self.target.categories is None else (y, len(self.target.categories))
        return Dataset(name, x, y, x[:0], y[:0], classes, None, self.target_scale)

    def described(self, table: Mapping[str, Sequence[str]]) -> str:
        """Describe a table by its size, and by a hash of the cells that are read."""
        cells = {column.name: table[column.name] for column in (*self.columns, self.target)}
        content = hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]
        return f"{len(table[self.target.name])} rows (content {content})"

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


def _column(entry: Any) -> Column:
    found = dict(entry)
    categories = found.pop("categories")
    name, had_missing = str(found.pop("name")), bool(found.pop("had_missing"))
    numbers = {key: float(found[key]) for key in ("mean", "std", "median")}
    if not all(math.isfinite(number) for number in numbers.values()) or not numbers["std"] > 0:
        raise ValueError(f"the numbers of {name} are not finite")
    kept = None if categories is None else tuple(str(category) for category in categories)
    return Column(name, **numbers, had_missing=had_missing, categories=kept)
