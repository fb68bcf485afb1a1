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
    cells = [((name, *row.cells()), "bold" if name == "bayeslim" else "") for name, row in rows.items()]
    return _table(("", *HEADINGS[1:]), cells, title)


def certainty_table(title: str, chosen: Sequence[int], prediction: Prediction, targets: Tensor) -> Table:
    """Build the table of predictions for a few inputs."""
    assert prediction.probs is not None
    rows = []
    for place in chosen:
        says, truth = int(prediction.classes[place]), int(targets[place])
        shown = prediction.probs[place].max(), prediction.aleatoric[place], prediction.epistemic[place]
        cells = str(truth), str(says) if says == truth else f"[red]{says}[/]", *(f"{float(v):.3f}" for v in shown)
        rows.append((cells, ""))
    return _table(("truth", "predicted", "probability", "noise (nats)", "ignorance (nats)"), rows, title)


def quality_table(rows: Mapping[str, Quality]) -> Table:
    """Build the table of a network's quality."""
    has_probabilities = any(row.brier is not None for row in rows.values())
    headings = ("error", "NLL", "Brier", "ECE") if has_probabilities else ("RMSE", "NLL", "calibration error")
    cells = []
    for name, row in rows.items():
        brier = () if row.brier is None else (number(row.brier),)
        numbers = number(row.scores.nll), *brier, number(row.scores.ece)
        cells.append(((name, row.scores.error_text, *numbers), "bold" if name == POSTERIOR else ""))
    return _table(("", *headings), cells)


def against_table(told: Mapping[str, Mapping[str, float]]) -> Table:
    """Build the table of how well uncertainty separates other data."""
    rows = [((name, *(f"{value:.3f}" for value in found.values())), "") for name, found in told.items()]
    return _table(("", "entropy", "epistemic uncertainty"), rows)


def data_table(entries: Sequence[Entry]) -> Table:
    """Build the table of data sets and their places."""
    rows = [((e.name, e.task, e.examples, e.shape, e.where), "" if e.is_here else "dim") for e in entries]
    table = _table(("name", "targets", "train + test", "shape", "where"), rows)
    for column in table.columns:
        column.justify = "right" if column.header == "train + test" else "left"
    table.columns[-1].no_wrap, table.columns[-1].overflow = False, "fold"
    return table


def _table(headings: Sequence[str], rows: Sequence[tuple[Sequence[str], str]], title: str | None = None) -> Table:
    """Build a table of rows with their styles, names to the left."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for cells, style in rows:
        table.add_row(*cells, style=style)
    return table
