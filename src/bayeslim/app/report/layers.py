"""The remaining weights of each layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.quantities import MISSING, number, percent, shape
from bayeslim.app.report.svg import Drawing
from bayeslim.bayesian import Bayesian
from bayeslim.sites import is_weight, owner

_ROW, _LABEL = 23.0, 150.0


@dataclass(frozen=True)
class Layer:
    """One weight: its shape before, the non-zeros left, and its shape in the compacted network ("" if unknown)."""

    name: str
    shape: tuple[int, ...]
    kept: int
    compacted: str

    @property
    def size(self) -> int:
        """The number of weights before the cut."""
        size = 1
        for length in self.shape:
            size *= length
        return size


def measure_layers(pruned: Bayesian, slim: nn.Module | None) -> list[Layer]:
    """Count the remaining weights of every layer of a pruned network.

    Args:
        pruned: the network after the cut.
        slim: its compacted form, if there is one.
    """
    small = {} if slim is None else {name: tuple(p.shape) for name, p in slim.named_parameters()}
    layers = []
    for name, p in pruned.mean_network().named_parameters():
        if is_weight(name, p, owner(pruned.model, name)[0]):
            mask = pruned.masks.get(name)
            kept = p.numel() if mask is None else int(mask.sum())
            layers.append(Layer(name, tuple(p.shape), kept, shape(small[name]) if name in small else ""))
    return layers


def draw_layers(layers: list[Layer], left: dict[str, str]) -> Figure:
    """Draw the layers as bars.

    Args:
        layers: the counts, from `measure_layers`.
        left: why parameters were left alone, by name.
    """
    title = "Weights left in each layer"
    total, kept = sum(layer.size for layer in layers), sum(layer.kept for layer in layers)
    words = "; ".join(f"{layer.name} {percent(layer.kept / layer.size)}" for layer in layers)
    drawing = Drawing(460, _ROW * len(layers) + 26, title, f"Weights left, of all {percent(kept / total)}: {words}.")
    width = 460 - _LABEL - 124
    for place, layer in enumerate(layers):
        y = _ROW * place + 4
        drawing.text((_LABEL - 8, y + 12), _short(layer.name), "", "end")
        drawing.rect((_LABEL, y + 2), (width, 12), "area rest")
        drawing.rect((_LABEL, y + 2), (max(width * layer.kept / layer.size, 0.8), 12), "area s0")
        drawing.text(
            (_LABEL + width + 8, y + 12), f"{percent(layer.kept / layer.size)} of {number(layer.size)}", "tick"
        )
    drawing.text(
        (_LABEL, _ROW * len(layers) + 20), f"All together: {percent(kept / total)} of {number(total)}.", "note"
    )
    rows = []
    for layer in layers:
        counts = number(layer.size), number(layer.kept), percent(1 - layer.kept / layer.size, 2)
        rows.append((layer.name, shape(layer.shape), *counts, layer.compacted or MISSING, left.get(layer.name, "")))
    headings = ("weight", "shape", "weights", "left", "cut", "compacted to", "remark")
    caption = "Weights that are not zero, as a share of the layer's. Layers whose units are idle shrink when compacted."
    return Figure(title, caption, drawing.render(), Table.of(headings, rows))


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"
