"""Networks side by side: the quality and the cost of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from bayeslim.app.benchmark import Benchmark
from bayeslim.app.report.figure import Table
from bayeslim.app.report.quantities import MISSING, duration, number, percent, size
from bayeslim.app.report.scores import Batches, Scores, score_network
from bayeslim.compact import Cost, cost
from bayeslim.compact.example import run_example
from bayeslim.compact.trace import evaluating_copy
from bayeslim.likelihoods import Likelihood
from bayeslim.train.progress import progress
from bayeslim.types import Inputs, device_of, to_device, with_batch_size

DENSE, MAGNITUDE, SLIM = "dense", "magnitude", "bayeslim"
"""The overview's names for the network before the cut, cut by magnitude, and cut by the posterior."""
HEADINGS = ("network", "error", "NLL", "calibration", "parameters", "non-zero", "size", "latency")
_CALLS_PER_TIMING = 5


@dataclass(frozen=True, eq=False)
class Row:
    """A network in the overview.

    Attributes:
        scores: on held-out data; None if there were none.
        cost: parameters, arithmetic and bytes; None if there was no example to run it on.
        seconds: the latency of one input; None if it was not measured.
    """

    scores: Scores | None = None
    cost: Cost | None = None
    seconds: float | None = None

    def cells(self) -> tuple[str, ...]:
        """Write the row as text, in the order of `HEADINGS` without the name."""
        scores = (MISSING,) * 3
        if self.scores is not None:
            scores = self.scores.error_text, f"{self.scores.nll:.3f}", percent(self.scores.ece, 2)
        costs = (MISSING,) * 3
        if self.cost is not None:
            costs = number(self.cost.parameters), number(self.cost.nonzeros), size(self.cost.bytes)
        return (*scores, *costs, MISSING if self.seconds is None else duration(self.seconds))


def measure_rows(
    networks: Mapping[str, nn.Module],
    likelihood: Likelihood,
    batches: Batches | None,
    example: Inputs | None,
    seconds: Mapping[str, float] | None = None,
) -> dict[str, Row]:
    """Measure plain networks side by side.

    Without data there are no scores, without an example no costs. Latencies are measured unless they are known
    (`seconds`).
    """
    rows = {}
    if seconds is None:
        seconds = {} if example is None else seconds_a_call(networks, example)
    for name, network in progress(networks.items(), "measuring networks", total=len(networks)):
        scores = None if batches is None else score_network(network, likelihood, batches)
        if example is None:
            rows[name] = Row(scores)
        else:
            rows[name] = Row(scores, cost(network, with_batch_size(example, 1)), seconds.get(name))
    return rows


def latencies(found: Benchmark) -> dict[str, float] | None:
    """Look up each network's eager latency for one input; None if it was not timed."""
    if 1 not in found.batch_sizes:
        return None
    names = dict.fromkeys(network for network, runtime, _ in found.seconds if runtime == "eager")
    return {SLIM if name == "slim" else name: found.latency(name, "eager", 1) for name in names}


def seconds_a_call(networks: Mapping[str, nn.Module], example: Inputs, rounds: int = 21) -> dict[str, float]:
    """Time a call of each network on one input: the median over rounds.

    The networks take turns, so that other load affects all alike.
    """
    one = with_batch_size(example, 1)
    taken: dict[str, list[float]] = {name: [] for name in networks}
    ready = {name: (evaluating_copy(n), to_device(one, device_of(n))) for name, n in networks.items()}
    for turn in range(rounds + 1):
        for name, (network, inputs) in ready.items():
            wait = torch.cuda.synchronize if device_of(network).type == "cuda" else lambda: None
            wait()
            started = time.perf_counter()
            for _ in range(_CALLS_PER_TIMING):
                run_example(network, inputs)
            wait()
            if turn:  # the first round warms up
                taken[name].append((time.perf_counter() - started) / _CALLS_PER_TIMING)
    return {name: statistics.median(values) for name, values in taken.items()}


def overview(rows: Mapping[str, Row], latency: bool = True) -> Table:
    """Build the table of the networks, with or without their latency."""
    end = len(HEADINGS) if latency else -1
    return Table.of(HEADINGS[:end], [(name, *row.cells())[:end] for name, row in rows.items()])
