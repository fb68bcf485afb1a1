"""What the network costs before and after: parameters, arithmetic, bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bayeslim.compact import Cost
from bayeslim.report.figure import Figure, Table
from bayeslim.report.quantities import duration, number, size, times
from bayeslim.report.svg import Drawing

_ROW, _LABEL = 33.0, 150.0


@dataclass(frozen=True)
class Quantity:
    """One cost before and after, and how it is written."""

    name: str
    dense: float
    slim: float
    written: Callable[[float], str]

    @classmethod
    def latency(cls, name: str, dense: float, slim: float) -> Quantity:
        """A time that was measured, in seconds."""
        return cls(name, dense, slim, duration)

    @property
    def share(self) -> float:
        """What is left of it."""
        return self.slim / self.dense if self.dense else 1.0

    @property
    def gain(self) -> str:
        """How many times smaller it is."""
        return times(self.dense / self.slim) if self.slim else "gone"


def counted(dense: Cost, slim: Cost) -> list[Quantity]:
    """The costs that can be counted."""
    return [
        Quantity("parameters", dense.parameters, slim.parameters, number),
        Quantity("non-zero parameters", dense.nonzeros, slim.nonzeros, number),
        Quantity("arithmetic, flops", dense.flops, slim.flops, number),
        Quantity("size on disk", dense.bytes, slim.bytes, size),
    ]


def draw_costs(quantities: Sequence[Quantity]) -> Figure:
    """Costs as bars: each as a share of what it was."""
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
    caption = "Each bar is what is left of the dense network's cost; on the right, how many times smaller it is."
    rows = [(q.name, q.written(q.dense), q.written(q.slim), q.gain) for q in quantities]
    return Figure(title, caption, drawing.render(), Table.of(("", "dense", "slim", "ratio"), rows))
