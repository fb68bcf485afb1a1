"""Error against sparsity: the error of every criterion at several cuts, and that of this network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.plot import plotted
from bayeslim.app.report.quantities import MISSING, number, percent
from bayeslim.app.report.scores import Batches, Scores, score_network
from bayeslim.app.style import LIGHT
from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError
from bayeslim.posteriors import Gaussian
from bayeslim.prune.apply import apply_plan
from bayeslim.prune.budget import Budget
from bayeslim.prune.criteria import CRITERIA, default_criterion
from bayeslim.prune.plan import plan_of, ranked
from bayeslim.prune.ranking import Ranking
from bayeslim.prune.search import fewest
from bayeslim.prune.settings import Settings
from bayeslim.train.progress import progress
from bayeslim.types import Inputs, Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Plot

Point = tuple[float, float]
LINES = ("-", "--", "-.", ":")
TICKS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
"""Sparsities that have a tick."""
GRID = (0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)
"""The sparsities that are measured, beside the one that was chosen."""


@dataclass(frozen=True)
class Curve:
    """The error of a network cut further and further: (sparsity, error) from no cut on."""

    name: str
    points: tuple[Point, ...]
    chosen: bool = False


@dataclass(frozen=True)
class Curves:
    """The measured curves.

    Attributes:
        curves: of all criteria; those with equal points are one.
        mark: sparsity and error of the pruned network.
        left_out: criteria that do not apply, and why.
        scores: of the network before any cut.
        granularity: "weight" or "unit".
    """

    curves: tuple[Curve, ...]
    mark: Point
    left_out: dict[str, str]
    scores: Scores
    granularity: str


def measure_curves(bnn: Bayesian, pruned: Bayesian, batches: Batches, example: Inputs) -> Curves:
    """Cut `bnn` by every criterion at several sparsities, and measure the errors.

    The survivors stay where they are, which compares rankings alone; if weights are correlated a further curve shows
    the chosen criterion with the survivors moved to where the posterior wants them.
    """
    posterior = bnn.posterior_
    granularity = "unit" if pruned.plan_ is not None and pruned.plan_.granularity == "unit" else "weight"
    chosen = pruned.plan_.criterion if pruned.plan_ is not None else ""
    chosen = chosen if chosen in CRITERIA else default_criterion(posterior, granularity == "unit")
    network = bnn.mean_network()
    dense = score_network(network, bnn.likelihood, batches)
    rankings, left_out = _rankings(bnn, granularity, example)
    if not rankings:
        raise BayeslimError(f"No criterion ranks the weights of this network: {left_out}.")
    weights = next(iter(rankings.values())).candidates.weights
    reached = sparsity(pruned.masks, weights, network)
    start = sparsity(bnn.masks, weights, network), dense.error

    def curve(ranking: Ranking, moved: bool) -> tuple[Point, ...]:
        points = [start]
        for count in _counts(ranking, reached, network):
            if count > ranking.gone:
                plan = plan_of(ranking, count, "", granularity, "")
                plain = apply_plan(bnn, plan).mean_network() if moved else network
                params = None if moved else masked(network, plan.masks)
                error = score_network(plain, bnn.likelihood, batches, params).error
                points.append((sparsity(plan.masks, weights, network), error))
            bar.advance()
        return tuple(points)

    moves = chosen in rankings and isinstance(posterior, Gaussian)
    curves: list[Curve] = []
    with progress(range(0), "measuring criteria", total=(len(rankings) + moves) * (len(GRID) + 1)) as bar:
        measured: list[tuple[Ranking, tuple[Point, ...]]] = []
        for name, ranking in rankings.items():
            # Criteria that rank alike, such as snr and curvature, are measured once.
            points = next((p for other, p in measured if torch.equal(other.order, ranking.order)), None)
            if points is None:
                points = curve(ranking, moved=False)
                measured.append((ranking, points))
            else:
                bar.advance(len(GRID) + 1)
            curves.append(Curve(name, points, name == chosen and not moves))
        if moves:
            curves.append(Curve(f"{chosen}, survivors moved", curve(rankings[chosen], moved=True), True))
    mark = reached, score_network(pruned.mean_network(), pruned.likelihood, batches).error
    return Curves(_merged(curves), mark, left_out, dense, granularity)


def sparsity(masks: Mapping[str, Tensor], weights: tuple[str, ...], network: nn.Module) -> float:
    """Compute the fraction of weights that masks set to zero."""
    size = sum(network.get_parameter(name).numel() for name in weights)
    return sum(int((~masks[name]).sum()) for name in weights if name in masks) / size


def masked(network: nn.Module, masks: Mapping[str, Tensor]) -> Params:
    """Return a network's parameters with masked weights set to zero."""
    parameters = {name: network.get_parameter(name).detach() for name in masks}
    return {name: p * masks[name].to(p) for name, p in parameters.items()}


def _rankings(bnn: Bayesian, granularity: str, example: Inputs) -> tuple[dict[str, Ranking], dict[str, str]]:
    rankings: dict[str, Ranking] = {}
    left_out: dict[str, str] = {}
    budget = Budget(sparsity=0.5, empty_layers="keep best")  # how far to go is decided later
    settings = Settings(granularity, example=example)
    for name in CRITERIA:
        try:
            rankings[name], _ = ranked(bnn, budget, replace(settings, criterion=name), None)
        except (BayeslimError, TypeError, ValueError) as error:
            left_out[name] = str(error)
    return rankings, left_out


def _counts(ranking: Ranking, reached: float, network: nn.Module) -> list[int]:
    """Choose the cut items at each point of a curve, the reached sparsity among them."""
    weights = ranking.candidates.weights

    def left(count: int) -> float:
        return 1 - sparsity(ranking.candidates.masks(ranking.cut(count)), weights, network)

    even = [round(fraction * len(ranking.candidates)) for fraction in GRID]
    same = fewest(left, 1 - reached + 1e-9, ranking.gone, ranking.limit)
    return sorted(min(count, ranking.limit) for count in (*even, same))


def _merged(curves: list[Curve]) -> tuple[Curve, ...]:
    merged: dict[tuple[Point, ...], Curve] = {}
    for curve in curves:
        same = merged.get(curve.points)
        name = curve.name if same is None else f"{same.name} = {curve.name}"
        merged[curve.points] = Curve(name, curve.points, curve.chosen or (same is not None and same.chosen))
    return tuple(sorted(merged.values(), key=lambda curve: not curve.chosen))


def draw_curves(found: Curves) -> Figure:
    """Draw the measured curves."""
    title = "Error against sparsity"
    caption = (
        f"Cut by each {found.granularity}'s score without retraining, measured on {found.scores.count:,} held-out "
        "targets; both axes are logarithmic. Criteria that give the same network are one line. The mark is "
        "this network with all that was done to it, such as cutting in steps or fine-tuning."
    )
    if found.left_out:
        caption += f" Not applicable here: {', '.join(found.left_out)}."
    unit = 100.0 if found.scores.is_fraction else 1.0
    picture = plotted(title, _described(found), 4.3, lambda plot: _draw(plot, found, unit))
    return Figure(title, caption, picture, _table(found, unit))


def _draw(plot: Plot, found: Curves, unit: float) -> None:
    ax = plot.subplots()
    floor = 50 / found.scores.count if found.scores.is_fraction else 1e-12
    end = max(found.mark[0], *(s for curve in found.curves for s, _ in curve.points))
    for place, curve in enumerate(found.curves):
        sparsities, errors = zip(*curve.points, strict=True)
        ax.plot(
            sparsities, [max(unit * error, floor) for error in errors], marker="o", markersize=3,
            color=f"C{place % len(LIGHT.colours)}", linestyle=LINES[place % len(LINES)],
            linewidth=2.4 if curve.chosen else 1.4, label=curve.name, zorder=9 if curve.chosen else 3,
        )  # fmt: skip
    ax.axvline(found.mark[0], color=LIGHT.quiet, linestyle=":", linewidth=1)
    ax.plot(
        found.mark[0], max(unit * found.mark[1], floor), "*", color=LIGHT.ink, markersize=12, linestyle="", zorder=10,
        label=f"this network, {percent(found.mark[0])} cut",
    )  # fmt: skip
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: number(value))
    ax.yaxis.set_minor_formatter(lambda value, _: number(value) if f"{value:.0e}"[0] in "25" else "")
    ax.set_xscale("function", functions=(_halvings, _after_halvings))
    ticks = [s for s in TICKS if s <= end + 1e-9]
    ax.set_xticks(ticks, [percent(s, 0 if s < 0.995 else 1) for s in ticks])
    ax.set_xlim(-0.02, end + 0.1 * (1 - end))
    ax.set(xlabel="weights cut", ylabel="error, %" if found.scores.is_fraction else "root mean squared error")
    ax.grid(linewidth=0.6)
    plot.legend(loc="outside upper center", ncols=2)


def _halvings(sparsity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Warp sparsities: every halving of the remaining weights is one step."""
    return -np.log2(np.clip(1 - np.asarray(sparsity), 1e-12, None))


def _after_halvings(steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Invert `_halvings`."""
    return np.asarray(1 - np.exp2(-np.asarray(steps)))


def _described(found: Curves) -> str:
    def say(error: float) -> str:
        return percent(error, 2) if found.scores.is_fraction else number(error)

    ends = "; ".join(
        f"{curve.name}: {say(curve.points[-1][1])} at {percent(curve.points[-1][0])}" for curve in found.curves
    )
    return (
        f"Before any cut the error is {say(found.scores.error)}. This network has {percent(found.mark[0])} of its "
        f"weights cut and an error of {say(found.mark[1])}. At the last cut tried: {ends}."
    )


def _table(found: Curves, unit: float) -> Table:
    """Build the table of the curves.

    It has a column for each curve if all have the same sparsities, else a row for each point.
    """
    places = [[round(s, 4) for s, _ in curve.points] for curve in found.curves]
    if any(place != places[0] for place in places):
        points = [(curve.name, *point) for curve in found.curves for point in curve.points]
        points.append(("this network", *found.mark))
        return Table.of(
            ("criterion", "sparsity", "error"), [(name, percent(s, 2), f"{unit * e:.4g}") for name, s, e in points]
        )
    errors = zip(*([f"{unit * e:.4g}" for _, e in curve.points] for curve in found.curves), strict=True)
    rows = [(percent(place, 2), *cells) for place, cells in zip(places[0], errors, strict=True)]
    last = (
        f"this network, {percent(found.mark[0], 2)}",
        f"{unit * found.mark[1]:.4g}",
        *[MISSING] * (len(found.curves) - 1),
    )
    return Table.of(("sparsity", *(curve.name for curve in found.curves)), [*rows, last])
