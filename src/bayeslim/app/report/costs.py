"""The costs before and after: parameters, arithmetic, bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bayeslim.app.benchmark import Benchmark
from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.overview import Row
from bayeslim.app.report.plot import bars
from bayeslim.app.report.quantities import duration, number, size, times

LATENCY = "latency, one input"


@dataclass(frozen=True)
class Quantity:
    """One cost before and after, and how it is written."""

    name: str
    dense: float
    slim: float
    written: Callable[[float], str]

    @property
    def share(self) -> float:
        """The fraction of the dense network's cost that remains."""
        return self.slim / self.dense if self.dense else 1.0

    @property
    def gain(self) -> str:
        """The ratio of the costs, as text."""
        return times(self.dense / self.slim) if self.slim else "gone"


def counted(dense: Row, slim: Row) -> list[Quantity]:
    """List the costs in two rows of an overview."""
    if dense.cost is None or slim.cost is None:
        return []
    quantities = [
        Quantity("parameters", dense.cost.parameters, slim.cost.parameters, number),
        Quantity("non-zero parameters", dense.cost.nonzeros, slim.cost.nonzeros, number),
        Quantity("arithmetic, flops", dense.cost.flops, slim.cost.flops, number),
        Quantity("stored", dense.cost.bytes, slim.cost.bytes, size),
    ]
    if dense.seconds is not None and slim.seconds is not None:
        quantities.append(Quantity(LATENCY, dense.seconds, slim.seconds, duration))
    return quantities


def compared(found: Benchmark, rows: Sequence[Quantity]) -> list[Quantity]:
    """List the costs in the overview, then those that only a benchmark has.

    The latency in the overview is one of the benchmark's, and is listed once.
    """
    dense, slim = found.sizes["dense"], found.sizes["slim"]
    quantities = [quantity for quantity in rows if quantity.name != LATENCY or 1 not in found.batch_sizes]
    quantities.append(Quantity("peak memory", dense.peak_bytes, slim.peak_bytes, size))
    quantities += [Quantity(f"{r} file", n, slim.file_bytes[r], size) for r, n in dense.file_bytes.items()]
    for batch in found.batch_sizes:
        for runtime in found.runtimes:
            before, after = (found.latency(network, runtime, batch) for network in ("dense", "slim"))
            quantities.append(Quantity(f"{runtime}, batch {batch}", before, after, duration))
    return quantities


def draw_costs(quantities: Sequence[Quantity]) -> Figure:
    """Draw costs as bars, each relative to the dense network."""
    title = "Size and latency"
    words = "; ".join(f"{q.name} {q.written(q.dense)} to {q.written(q.slim)}, {q.gain}" for q in quantities)
    caption = (
        "Each bar is a cost of the slim network, in per cent of the dense one. Latencies are medians on this machine."
    )
    rows = [(q.name, q.written(q.dense), q.written(q.slim), q.gain) for q in quantities]
    shown = [(q.name, 100 * q.share, f"{q.written(q.dense)} → {q.written(q.slim)},  {q.gain}") for q in quantities]
    picture = bars(title, f"Before and after: {words}.", shown, "% of the dense network")
    return Figure(title, caption, picture, Table.of(("", "dense", "slim", "ratio"), rows))
