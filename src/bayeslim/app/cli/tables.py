"""Results as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from bayeslim.app.cli.datasets import Entry
from bayeslim.app.cli.evaluating import POSTERIOR, Quality
from bayeslim.app.report.overview import HEADINGS, Row
from bayeslim.app.report.quantities import number
from bayeslim.results import Prediction


def network_table(rows: Mapping[str, Row], title: str) -> Table:
    """Build the table of networks side by side."""
    table = _table(title)
    table.add_column("", no_wrap=True)
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(name, *row.cells(), style="bold" if name == "bayeslim" else "")
    return table


def certainty_table(title: str, chosen: Sequence[int], prediction: Prediction, targets: Tensor) -> Table:
    """Build the table of predictions for a few inputs."""
    table = _table(title)
    for heading in ("truth", "predicted", "probability", "noise (nats)", "ignorance (nats)"):
        table.add_column(heading, justify="right", no_wrap=True)
    assert prediction.probs is not None
    for place in chosen:
        says, truth = int(prediction.classes[place]), int(targets[place])
        table.add_row(
            str(truth),
            str(says) if says == truth else f"[red]{says}[/]",
            f"{float(prediction.probs[place].max()):.3f}",
            f"{float(prediction.aleatoric[place]):.3f}",
            f"{float(prediction.epistemic[place]):.3f}",
        )
    return table


def quality_table(rows: Mapping[str, Quality]) -> Table:
    """Build the table of a network's quality."""
    table = _table()
    table.add_column("", no_wrap=True)
    has_probabilities = any(row.brier is not None for row in rows.values())
    headings = ("error", "NLL", "Brier", "ECE") if has_probabilities else ("RMSE", "NLL", "calibration error")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        brier = () if row.brier is None else (number(row.brier),)
        cells = (row.scores.error_text, number(row.scores.nll), *brier, number(row.scores.ece))
        table.add_row(name, *cells, style="bold" if name == POSTERIOR else "")
    return table


def against_table(told: Mapping[str, Mapping[str, float]]) -> Table:
    """Build the table of how well uncertainty separates other data."""
    table = _table()
    for heading in ("", "entropy", "epistemic uncertainty"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, found in told.items():
        table.add_row(name, *(f"{value:.3f}" for value in found.values()))
    return table


def data_table(entries: Sequence[Entry]) -> Table:
    """Build the table of data sets and their places."""
    table = _table()
    for heading in ("name", "targets", "train + test", "shape"):
        table.add_column(heading, justify="right" if "+" in heading else "left", no_wrap=True)
    table.add_column("where", overflow="fold")
    for entry in entries:
        cells = (entry.name, entry.task, entry.examples, entry.shape, entry.where)
        table.add_row(*cells, style="" if entry.is_here else "dim")
    return table


def _table(title: str | None = None) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
