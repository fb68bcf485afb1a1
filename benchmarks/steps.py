"""Cost of Bayesian training steps and predictions, relative to the plain network.

    python benchmarks/steps.py          this library against the plain network
    make benchmark-peers                the same, with the peers of peers.txt in the same process

A step is forward, KL, backward and optimizer on a batch of 128; a prediction averages 32 networks and is compared with
one pass of the plain network, the mean of several in a row. Contenders take turns: every round times each of them, in a
new order, and a ratio is taken within its round. A turn that other processes disturbed is repeated. The median over
rounds is printed with the quartiles.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from contenders import OURS, PEERS, PLAIN, SAMPLES, Contender, plain
from environment import RESULTS, save, versions
from quiet import Patience

import bayeslim as bl

BATCH = 128
NETWORKS = {"mlp": "MLP 784-400-400-10", "lenet5": "LeNet-5"}
STEPS_PER_TURN = {"mlp": 8, "lenet5": 3}
"""Timed steps in one turn."""
INPUTS = (1_000, 2_000, 10_000)
PASSES_PER_TURN = 8
"""Passes of the plain network in its turn, because the first one is often faster than the next ones."""

Times = dict[str, list[tuple[float, float]]]
"""The turns of a contender: seconds, and the cores that other processes used."""
Parts = dict[str, dict[str, dict[str, float]]]
"""Rows of numbers by contender, by the name of the measurement."""


def build(network: str) -> dict[str, Contender]:
    """Build every contender whose package is installed, on the same network and batch."""
    torch.manual_seed(0)
    model = bl.zoo.create(network)
    batch = torch.rand(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    installed = versions(PEERS)
    builders = {PLAIN: plain, **OURS} | {name: PEERS[name] for name in installed}
    return {name: builder(model, batch) for name, builder in builders.items()}


def take_turns(actions: dict[str, Callable[[], Any]], seconds: float, calls: int, patience: float) -> Times:
    """Time each action once in every round; record the cores that others used.

    A turn of several calls counts their median, after one call that is not timed.

    Args:
        actions: the actions to time, by name.
        seconds: the time for all rounds; there is at least one.
        calls: calls of an action in its turn.
        patience: the further seconds that may go into repeating disturbed turns.
    """
    order = list(actions)
    shuffle = random.Random(0).shuffle
    waiting = Patience(patience)
    times: Times = {name: [] for name in actions}
    spent = 0.0
    while not all(times.values()) or spent < seconds:
        shuffle(order)
        for name in order:
            times[name].append(waiting.undisturbed(lambda name=name: _turn(actions[name], calls)))
            spent += times[name][-1][0] * calls
    return times


def _turn(action: Callable[[], Any], calls: int) -> float:
    if calls > 1:
        action()
    return statistics.median(_seconds(action) for _ in range(calls))


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def summary(times: Times) -> dict[str, dict[str, float]]:
    """Compute median milliseconds, and the median and quartiles of the ratio.

    The ratio is to the plain network. `others` is the most cores that other processes used in a turn that counts.
    """
    rows = {}
    for name, turns in times.items():
        ratios = [mine / base for (mine, _), (base, _) in zip(turns, times[PLAIN], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        milliseconds = 1e3 * statistics.median(seconds for seconds, _ in turns)
        disturbance = max(cores for _, cores in turns)
        row = {"ms": milliseconds, "ratio": middle, "ratio_low": low, "ratio_high": high, "others": disturbance}
        rows[name] = {key: float(f"{value:.4g}") for key, value in row.items()} | {"rounds": len(turns)}
    return rows


def measure(network: str, seconds: float, patience: float, inputs: Iterable[int] = INPUTS) -> Parts:
    """Measure all timings of one network."""
    contenders = build(network)
    steps = {name: contender.step for name, contender in contenders.items()}
    results = {"step": summary(take_turns(steps, seconds, STEPS_PER_TURN[network], patience))}
    for count in inputs:
        x = torch.rand(count, 1, 28, 28)
        predictions = {name: _prediction(contender, x) for name, contender in contenders.items()}
        predictions[PLAIN] = _repeated(predictions[PLAIN])
        times = take_turns(predictions, seconds, 1, patience)
        times[PLAIN] = [(turn / PASSES_PER_TURN, cores) for turn, cores in times[PLAIN]]
        results[f"predict {count}"] = summary(times)
    return results


def _prediction(contender: Contender, x: torch.Tensor) -> Callable[[], Any]:
    def predict() -> torch.Tensor:
        with torch.no_grad():
            return contender.predict(x)

    return predict


def _repeated(action: Callable[[], Any]) -> Callable[[], Any]:
    def all_of_them() -> None:
        for _ in range(PASSES_PER_TURN):
            action()

    return all_of_them


def goals(results: dict[str, Parts]) -> list[dict[str, Any]]:
    """Compare the goals with the measurements of this run."""
    found = []

    def check(what: str, measured: float, limit: float) -> None:
        found.append({"goal": what, "limit": limit, "measured": float(f"{measured:.4g}"), "met": measured <= limit})

    for network, parts in results.items():
        title = NETWORKS[network]
        steps = {name: row["ratio"] for name, row in parts["step"].items()}
        peers = {name: ratio for name, ratio in steps.items() if name in PEERS}
        if network == "mlp" and peers:
            best = min(peers, key=peers.__getitem__)
            check(f"{title}: shared step / best peer's ({best})", steps["bayeslim shared"] / peers[best], 0.7)
        if network == "lenet5":
            check(f"{title}: shared step / plain step", steps["bayeslim shared"], 1.15)
        check(f"{title}: local step / plain step", steps["bayeslim local"], 2.4)
        for part, rows in parts.items():
            if part.startswith("predict"):
                check(f"{title}: {part} inputs, {SAMPLES} samples / one pass", rows["bayeslim shared"]["ratio"], 33)
    return found


def table(results: dict[str, Parts]) -> str:
    """Format the results as a table."""
    lines = []
    for network, parts in results.items():
        for part, rows in parts.items():
            against = "the plain step" if part == "step" else "one plain pass"
            heading = "training step" if part == "step" else f"{part} inputs, {SAMPLES} samples"
            lines += ["", f"{NETWORKS[network]}, {heading} (ratio to {against})"]
            for name, row in rows.items():
                spread = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
                lines.append(f"  {name:<24}{row['ms']:>11.2f} ms {row['ratio']:>8.2f}   ({spread})")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="which networks")
    parser.add_argument("--inputs", nargs="*", type=int, default=INPUTS, help="how many inputs to predict")
    parser.add_argument("--seconds", type=float, default=60, help="time for each table (one round at least)")
    parser.add_argument("--patience", type=float, default=300, help="more seconds, for what others disturbed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results file")
    options = parser.parse_args()
    missing = [name for name in PEERS if name not in versions(PEERS)]
    if missing:
        print(f"Not installed, so not compared: {', '.join(missing)} (make benchmark-peers has them all).")
    results = {
        network: measure(network, options.seconds, options.patience, options.inputs) for network in options.networks
    }
    print(table(results), "\n")
    checked = goals(results)
    for goal in checked:
        print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['goal']}: {goal['measured']:.2f} (limit {goal['limit']})")
    report = {"batch": BATCH, "samples": SAMPLES, "results": results, "goals": checked}
    print(f"\nSaved {save('steps', report, PEERS, options.results)}")


if __name__ == "__main__":
    main()
