"""The remaining weights of each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.plot import bars
from bayeslim.app.report.quantities import MISSING, number, percent, shape
from bayeslim.bayesian import Bayesian
from bayeslim.sites import is_weight, owner


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
        return math.prod(self.shape)

    @property
    def share(self) -> float:
        """The fraction of them that is left."""
        return self.kept / self.size


def measure_layers(pruned: Bayesian, slim: nn.Module | None) -> list[Layer]:
    """Count the remaining weights of every layer of a pruned network."""
    small = {} if slim is None else {name: tuple(p.shape) for name, p in slim.named_parameters()}
    layers = []
    for name, p in pruned.mean_network().named_parameters():
        if is_weight(name, p, owner(pruned.model, name)[0]):
            mask = pruned.masks.get(name)
            kept = p.numel() if mask is None else int(mask.sum())
            layers.append(Layer(name, tuple(p.shape), kept, shape(small[name]) if name in small else ""))
    return layers


def draw_layers(layers: list[Layer], left: dict[str, str]) -> Figure:
    """Draw the layers as bars; `left` says why parameters were left alone, by name."""
    title = "Weights left in each layer"
    total, kept = sum(layer.size for layer in layers), sum(layer.kept for layer in layers)
    words = "; ".join(f"{layer.name} {percent(layer.share)}" for layer in layers)
    rows = []
    for layer in layers:
        counts = number(layer.size), number(layer.kept), percent(1 - layer.share, 2)
        rows.append((layer.name, shape(layer.shape), *counts, layer.compacted or MISSING, left.get(layer.name, "")))
    headings = ("weight", "shape", "weights", "left", "cut", "compacted to", "remark")
    caption = (
        f"{percent(kept / total)} of all {number(total)} weights are left. Layers whose units are idle shrink when "
        "compacted; the table has their new shapes."
    )
    shown = [(_short(each.name), 100 * each.share, f"{percent(each.share)} of {number(each.size)}") for each in layers]
    picture = bars(title, f"Weights left, of all {percent(kept / total)}: {words}.", shown, "weights left, %")
    return Figure(title, caption, picture, Table.of(headings, rows))


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"
