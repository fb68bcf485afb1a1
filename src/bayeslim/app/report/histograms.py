"""Histograms of weights and of their signal-to-noise ratios, cut and kept, with the threshold of a single cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.plot import plotted
from bayeslim.app.report.quantities import number, percent
from bayeslim.app.style import LIGHT
from bayeslim.bayesian import Bayesian
from bayeslim.sites import is_weight, owner

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Plot

BINS = 48
_TAIL_FRACTION = 0.001
"""The fraction of values on either side that goes into the outermost bins."""
_MIN_RATIO_SHOWN = 1e-6
"""The smallest ratio shown, as a fraction of the largest; smaller ones go into the first bin."""


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of values in bins.

    Attributes:
        edges: of the bins, (B + 1,).
        all: values of all weights, (B,).
        kept: those of the weights that are left, (B,).
        moved: of the weights that are left, where they are now; None if that says nothing new, (B,).
        cutoffs: where a single cut of as many weights would be.
        is_log: whether bins are even on a logarithmic axis.
    """

    edges: Tensor
    all: Tensor
    kept: Tensor
    moved: Tensor | None
    cutoffs: tuple[float, ...]
    is_log: bool

    @property
    def cumulative(self) -> Tensor:
        """The share of all weights up to the end of each bin."""
        return self.all.cumsum(0) / self.all.sum()


def measure_snr(bnn: Bayesian, pruned: Bayesian) -> Histogram:
    """Count signal-to-noise ratios |μ|/σ before the cut."""
    mean, kept = _weights(bnn, pruned)
    std = torch.cat([bnn.posterior_.std[name].detach().double().flatten().cpu() for name in _names(bnn)])
    ratio = torch.where(mean == 0, 0.0, mean.abs() / std)
    finite = ratio[torch.isfinite(ratio) & (ratio > 0)]
    low, high = (
        (float(v) for v in _quantiles(finite, _TAIL_FRACTION, 1 - _TAIL_FRACTION)) if len(finite) else (0.1, 10.0)
    )
    low, high = max(low, high * _MIN_RATIO_SHOWN), max(high, low * 10)
    edges = torch.logspace(math.log10(low), math.log10(high), BINS + 1, dtype=torch.float64)
    return Histogram(edges, _counts(ratio, edges), _counts(ratio[kept], edges), None, _cutoff(ratio, kept), True)


def measure_weights(bnn: Bayesian, pruned: Bayesian) -> Histogram:
    """Count the weights before the cut, and the survivors after it."""
    mean, kept = _weights(bnn, pruned)
    now, _ = _weights(pruned, pruned, _names(bnn))
    reach = float(_quantiles(torch.cat([mean, now]).abs(), 1 - _TAIL_FRACTION)[0]) or 1.0
    edges = torch.linspace(-reach, reach, BINS + 1, dtype=torch.float64)
    moved = None if torch.equal(now[kept], mean[kept]) else _counts(now[kept], edges)
    cutoff = _cutoff(mean.abs(), kept)
    both = tuple(sorted({-cutoff[0], cutoff[0]})) if cutoff else ()
    return Histogram(edges, _counts(mean, edges), _counts(mean[kept], edges), moved, both, False)


def draw_snr(found: Histogram) -> Figure:
    """Draw signal-to-noise ratios."""
    caption = (
        "|μ|/σ of every weight before the cut, counts on a logarithmic axis. A single cut of as many by this ratio "
        "would be at the dashed line: weights kept to its left were kept for another reason."
    )
    return _figure(found, "Signal to noise", "|μ| / σ", caption)


def draw_weights(found: Histogram) -> Figure:
    """Draw weights."""
    caption = (
        "Posterior means before the cut, counts on a logarithmic axis. The dashed lines are where pruning by magnitude "
        "would cut as much: weights kept between them are small, and matter all the same."
    )
    return _figure(found, "Weights", "posterior mean μ", caption)


def _figure(found: Histogram, title: str, label: str, caption: str) -> Figure:
    total, kept = int(found.all.sum()), int(found.kept.sum())
    description = f"Histogram of {total:,} weights of which {kept:,} are kept."
    if found.cutoffs:
        description += f" A single cut of as many would be at {' and '.join(number(c) for c in found.cutoffs)}."
    picture = plotted(title, description, 3.6, lambda plot: _draw(plot, found, label))
    edges = [float(edge) for edge in found.edges]
    bins = zip(found.all.tolist(), found.kept.tolist(), found.cumulative.tolist(), strict=True)
    rows = [
        (f"{low:.4g} to {high:.4g}", number(count), number(left), percent(share, 2))
        for (low, high), (count, left, share) in zip(itertools.pairwise(edges), bins, strict=True)
    ]
    return Figure(title, caption, picture, Table.of((label, "weights", "kept", "cumulative"), rows))


def _draw(plot: Plot, found: Histogram, label: str) -> None:
    ax = plot.subplots()
    edges = found.edges.tolist()
    ax.stairs(found.all.tolist(), edges, fill=True, color=LIGHT.rest, label="all weights")
    ax.stairs(found.kept.tolist(), edges, fill=True, color="C0", label="kept")
    if found.moved is not None:
        ax.stairs(found.moved.tolist(), edges, color="C2", linewidth=1.2, label="kept, where they are now")
    for place, cutoff in enumerate(found.cutoffs):
        words = None if place else f"single cut at {'±' if len(found.cutoffs) > 1 else ''}{number(abs(cutoff))}"
        ax.axvline(cutoff, color=LIGHT.ink, linestyle="--", linewidth=1, label=words)
    ax.set(xlabel=label, ylabel="weights", yscale="log", xlim=(edges[0], edges[-1]))
    ax.set_xscale("log" if found.is_log else "linear")
    share = ax.twinx()
    share.plot(edges, [0.0, *(100 * found.cumulative).tolist()], color="C1", linewidth=1.4, label="cumulative share")
    share.set(ylim=(0, 104), ylabel="cumulative share, %")
    share.spines["right"].set_visible(True)
    handles = [handle for axis in (ax, share) for handle in axis.get_legend_handles_labels()[0]]
    plot.legend(handles=handles, loc="outside upper center", ncols=3)


def _names(bnn: Bayesian) -> list[str]:
    names = [n for n in bnn.posterior_.names if is_weight(n, bnn.model.get_parameter(n), owner(bnn.model, n)[0])]
    return names or list(bnn.posterior_.names)


def _weights(bnn: Bayesian, pruned: Bayesian, names: list[str] | None = None) -> tuple[Tensor, Tensor]:
    """Concatenate all weights; also return which of them survive."""
    names = _names(bnn) if names is None else names
    mean = bnn.posterior_.mean
    whole = {name: torch.ones_like(mean[name], dtype=torch.bool) for name in names}
    kept = torch.cat([(pruned.masks.get(name, whole[name])).flatten().cpu() for name in names])
    return torch.cat([mean[name].detach().double().flatten().cpu() for name in names]), kept


def _counts(values: Tensor, edges: Tensor) -> Tensor:
    inside = values.clamp(float(edges[0]), float(edges[-1]))
    which = torch.bucketize(inside, edges[1:-1], right=True)
    return torch.bincount(which, minlength=len(edges) - 1)


def _cutoff(scores: Tensor, kept: Tensor) -> tuple[float, ...]:
    """Find the score below which as many weights lie as were cut."""
    gone = int((~kept).sum())
    return (float(scores.kthvalue(gone).values),) if 0 < gone < len(scores) else ()


def _quantiles(values: Tensor, *shares: float) -> list[Tensor]:
    ordered = values.sort().values
    return [ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in shares]
