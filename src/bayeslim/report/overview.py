"""Networks side by side: how good each one is, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayeslim.compact import Cost, cost
from bayeslim.likelihoods import Likelihood
from bayeslim.progress import progress
from bayeslim.prune.price import seconds_a_call
from bayeslim.report.figure import Table
from bayeslim.report.quantities import MISSING, duration, number, percent, size
from bayeslim.report.scores import Batches, Scores, score_network
from bayeslim.types import Inputs, batch_size

HEADINGS = ("network", "error", "NLL", "calibration", "parameters", "non-zero", "size", "latency")


@dataclass(frozen=True, eq=False)
class Row:
    """A network in the overview.

    Attributes:
        scores: on held-out data; None if there were none.
        cost: what it takes; None if there was no example to run it on.
        seconds: a call on the example takes; None likewise.
    """

    scores: Scores | None = None
    cost: Cost | None = None
    seconds: float | None = None

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of `HEADINGS` without the name."""
        scores = (MISSING,) * 3
        if self.scores is not None:
            scores = self.scores.error_text, f"{self.scores.nll:.4f}", percent(self.scores.ece, 2)
        costs = (MISSING,) * 3
        if self.cost is not None:
            costs = number(self.cost.parameters), number(self.cost.nonzeros), size(self.cost.bytes)
        return (*scores, *costs, MISSING if self.seconds is None else duration(self.seconds))


def measure_rows(
    networks: Mapping[str, nn.Module], likelihood: Likelihood, batches: Batches | None, example: Inputs | None
) -> dict[str, Row]:
    """Measure plain networks side by side.

    Args:
        networks: by name.
        likelihood: what their outputs mean.
        batches: held-out data, if there are any.
        example: inputs to count and time them on, if there are any.
    """
    rows = {}
    for name, network in progress(networks.items(), "measuring networks", total=len(networks)):
        scores = None if batches is None else score_network(network, likelihood, batches)
        if example is None:
            rows[name] = Row(scores)
        else:
            first = one_input(example)
            rows[name] = Row(scores, cost(network, first), seconds_a_call(network, first))
    return rows


def one_input(example: Inputs) -> Inputs:
    """The first of the inputs in an example, as a batch of one."""
    count = batch_size(example)
    return pytree.tree_map(lambda x: x[:1] if isinstance(x, Tensor) and x.ndim and x.shape[0] == count else x, example)


def overview(rows: Mapping[str, Row]) -> Table:
    """The networks as a table."""
    return Table.of(HEADINGS, [(name, *row.cells()) for name, row in rows.items()])
