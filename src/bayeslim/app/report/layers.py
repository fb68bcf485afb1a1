"""The remaining weights of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.plot import plotted
from bayeslim.app.report.quantities import MISSING, number, percent, shape
from bayeslim.app.style import LIGHT
from bayeslim.bayesian import Bayesian
from bayeslim.sites import is_weight, owner

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Plot


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
    rows = []
    for layer in layers:
        counts = number(layer.size), number(layer.kept), percent(1 - layer.kept / layer.size, 2)
        rows.append((layer.name, shape(layer.shape), *counts, layer.compacted or MISSING, left.get(layer.name, "")))
    headings = ("weight", "shape", "weights", "left", "cut", "compacted to", "remark")
    caption = (
        f"{percent(kept / total)} of all {number(total)} weights are left. Layers whose units are idle shrink when "
        "compacted; the table has their new shapes."
    )
    picture = plotted(
        title,
        f"Weights left, of all {percent(kept / total)}: {words}.",
        0.6 + 0.26 * len(layers),
        lambda plot: _draw(plot, layers),
    )
    return Figure(title, caption, picture, Table.of(headings, rows))


def _draw(plot: Plot, layers: list[Layer]) -> None:
    ax = plot.subplots()
    places = range(len(layers))
    ax.barh(places, [100] * len(layers), color=LIGHT.rest, height=0.6)
    ax.barh(places, [100 * layer.kept / layer.size for layer in layers], color="C0", height=0.6)
    ax.set_yticks(places, [_short(layer.name) for layer in layers])
    right = ax.secondary_yaxis("right")
    right.set_yticks(places, [f"{percent(layer.kept / layer.size)} of {number(layer.size)}" for layer in layers])
    for axis in (ax, right):
        axis.tick_params(axis="y", length=0)
    for side in (ax.spines["left"], right.spines["right"]):
        side.set_visible(False)
    ax.set_ylim(len(layers) - 0.5, -0.5)
    ax.set_xlim(0, 100)
    ax.set_xlabel("weights left, %")


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"
