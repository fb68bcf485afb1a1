"""The result of `compress`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from bayeslim.app.benchmark import Benchmark
from bayeslim.app.report.overview import HEADINGS, Row
from bayeslim.bayesian import Bayesian
from bayeslim.prune import Plan


@dataclass(frozen=True, eq=False, repr=False)
class Compressed:
    """A compressed network, with its measurements.

    Attributes:
        slim: the plain, smaller network.
        pruned: the Bayesian network after the cut, for predictions with uncertainty.
        bnn: the network before the cut.
        plan: the cut.
        rows: the networks side by side by name: "dense", "magnitude" and "bayeslim".
        benchmark: the dense against the slim network in every installed runtime.
        files: the files written: the slim network's folder, exported files, the report.
        folder: the run's folder.
        notes: parts that were left out, and why; a warning if the error rose much.
    """

    slim: nn.Module
    pruned: Bayesian
    bnn: Bayesian
    plan: Plan
    rows: Mapping[str, Row]
    benchmark: Benchmark
    files: tuple[Path, ...]
    folder: Path
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        table = [HEADINGS, *((name, *row.cells()) for name, row in self.rows.items())]
        widths = [max(len(line[column]) for line in table) for column in range(len(HEADINGS))]
        lines = [
            "  ".join(cell.ljust(width) if not k else cell.rjust(width) for k, (cell, width) in enumerate(cells))
            for cells in (list(zip(line, widths, strict=True)) for line in table)
        ]
        return "\n".join(("Compressed:", *lines, *(str(file) for file in self.files), *self.notes))
