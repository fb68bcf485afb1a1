"""Growth curves of the benchmark suite: how time grows with width, depth, data and samples.

    time ≈ c · x^p        p is the slope of log time over log x between the larger sizes

Every round of the turns has a slope of its own; the table shows their median and quartiles.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from contenders import PLAIN
from steps import take_turns
from suite import BATCH, METHODS, Action, Problem

import bayeslim as bl

SIZES: dict[str, tuple[int, ...]] = {
    "width": (100, 200, 400, 800, 1600),
    "depth": (1, 2, 4, 8, 16),
    "data": (512, 1024, 2048, 4096),
    "samples": (4, 8, 16, 32, 64),
}
SMALL_SIZES: dict[str, tuple[int, ...]] = {
    "width": (8, 16, 32), "depth": (1, 2, 3), "data": (128, 256), "samples": (2, 4),
}  # fmt: skip
"""For a trial."""
SIZES_OF_THE_SLOPE = 3
"""The slope is fitted to this many of the largest sizes: at small ones the overhead of calls dominates."""
TITLES = {
    "width": "a step, hidden units of each layer",
    "depth": "a step, hidden layers of 200 units",
    "data": "a fit of one epoch, examples",
    "samples": "a prediction of 200 inputs, networks",
}
DEPTH_WIDTH = 200
INPUTS = 200


def curves(axis: str, device: str, seconds: float, small: bool = False) -> dict[str, Any]:
    """Measure one growth curve for the plain network and some methods.

    Args:
        axis: "width", "depth", "data" or "samples".
        device: where to run.
        seconds: the time for all rounds; there is at least one.
        small: whether to take the sizes of a trial.
    """
    sizes = (SMALL_SIZES if small else SIZES)[axis]
    actions: dict[str, Action] = {}
    for size in sizes:
        for name, action in _actions(axis, size, device, small).items():
            action()
            actions[f"{name}|{size}"] = _waiting(action) if device == "cuda" else action
    times = take_turns(actions, seconds, 1, patience=0.2 * seconds)
    names = list(dict.fromkeys(key.partition("|")[0] for key in times))
    found = {}
    for name in names:
        turns = [[times[f"{name}|{size}"][k][0] for size in sizes] for k in range(len(times[f"{name}|{sizes[0]}"]))]
        slopes = [slope(sizes[-SIZES_OF_THE_SLOPE:], turn[-SIZES_OF_THE_SLOPE:]) for turn in turns]
        low, middle, high = statistics.quantiles(slopes, n=4, method="inclusive") if len(slopes) > 1 else slopes * 3
        found[name] = {
            "ms": [float(f"{1e3 * statistics.median(column):.4g}") for column in zip(*turns, strict=True)],
            "exponent": round(middle, 3),
            "exponent_low": round(low, 3),
            "exponent_high": round(high, 3),
            "rounds": len(turns),
        }
    return {"sizes": list(sizes), "curves": found}


def slope(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """Fit the exponent by least squares on logarithms.

    >>> round(slope((1, 2, 4), [3.0, 12.0, 48.0]), 6)
    2.0
    """
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    return statistics.linear_regression(x, y).slope


def _actions(axis: str, size: int, device: str, small: bool) -> dict[str, Action]:
    """Make the actions of one size."""
    hidden = 16 if small else 400
    torch.manual_seed(0)
    if axis == "samples":
        problem = Problem.of(bl.zoo.create("mlp", hidden=hidden), device, INPUTS, BATCH)
        return {name: _prediction(problem, name, size) for name in ("Variational, local noise", "SWAG")}
    if axis == "data":
        problem = Problem.of(bl.zoo.create("mlp", hidden=hidden), device, 1, size)
        names = ("Variational, local noise", "Laplace, Kronecker", "Laplace, diagonal")
        return {PLAIN: _plain_epoch(problem)} | {name: _epoch(problem, name) for name in names}
    shape = {"hidden": size} if axis == "width" else {"hidden": 16 if small else DEPTH_WIDTH, "depth": size}
    problem = Problem.of(bl.zoo.create("mlp", **shape), device, 1, BATCH)
    names = [PLAIN, "Variational, shared noise", "Variational, local noise", "SGHMC"]
    builders = problem.contenders(names)
    return {name: builders[name]().step for name in names}


def _prediction(problem: Problem, name: str, samples: int) -> Action:
    bnn = METHODS[name].fit(problem.network, problem.loader).eval()
    return lambda: bl.predict(bnn, problem.inputs, samples=samples, how="sample")


def _epoch(problem: Problem, name: str) -> Action:
    entry = METHODS[name]

    def fit() -> None:
        bnn = entry.bayesian(problem.network)
        curvature_only = isinstance(bnn.method, bl.Laplace)
        bnn.fit(problem.loader, progress=False, **({} if curvature_only else {"epochs": 1}))

    return fit


def _plain_epoch(problem: Problem) -> Action:
    def fit() -> None:
        network = copy.deepcopy(problem.network)
        optimizer = torch.optim.Adam(network.parameters(), fused=True)
        for x, y in problem.loader:
            torch.nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return fit


def _waiting(action: Action) -> Callable[[], None]:
    def run() -> None:
        action()
        torch.cuda.synchronize()

    return run
