"""The costs before and after: parameters, arithmetic, bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bayeslim.app.benchmark import Benchmark
from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.overview import Row
from bayeslim.app.report.quantities import duration, number, size, times
from bayeslim.app.report.svg import Drawing

LATENCY = "latency, one input"
_ROW, _LABEL = 33.0, 172.0


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

    Args:
        found: the benchmark.
        rows: the costs in the overview, from `counted`. Its latency is one of the benchmark's, and is listed once.
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
    drawing = Drawing(460, _ROW * len(quantities) + 4, title, f"Before and after: {words}.")
    width = 460 - _LABEL - 62
    most = max(1.0, *(q.share for q in quantities))
    for place, q in enumerate(quantities):
        y = _ROW * place + 2
        drawing.text((_LABEL - 8, y + 13), q.name, "", "end")
        drawing.rect((_LABEL, y + 3), (width / most, 11), "area rest")
        drawing.rect((_LABEL, y + 3), (max(width * q.share / most, 0.8), 11), "area s0")
        drawing.text((_LABEL, y + 26), f"{q.written(q.dense)} → {q.written(q.slim)}", "tick")
        drawing.text((456, y + 13), q.gain, "strong", "end")
    caption = "Each bar is a cost of the slim network relative to the dense one; the ratio is on the right."
    rows = [(q.name, q.written(q.dense), q.written(q.slim), q.gain) for q in quantities]
    return Figure(title, caption, drawing.render(), Table.of(("", "dense", "slim", "ratio"), rows))
