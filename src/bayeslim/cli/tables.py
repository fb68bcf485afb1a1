"""Results as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from bayeslim.report.overview import HEADINGS, Row
from bayeslim.results import Prediction


def network_table(rows: Mapping[str, Row], title: str) -> Table:
    """Networks side by side."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(name, *row.cells(), style="bold" if name == "bayeslim" else "")
    return table


def certainty_table(title: str, chosen: Sequence[int], prediction: Prediction, targets: Tensor) -> Table:
    """What a network says of a few inputs."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
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
