"""Cost of a sampler's step, relative to a step of SGD with momentum.

    python benchmarks/samplers.py                    on the CPU
    python benchmarks/samplers.py --device cuda      on a GPU

A step is forward, backward and optimizer on a batch of 128. SGD is torch's own, with momentum 0.9, on the plain network
by cross-entropy, without a prior. Samplers have the prior N(0, 1) as weight decay, as in `fit` (which also computes its
value, for the history); the last two have it in the loss, as any other prior would be. Contenders take turns: every
round times each of them, in a new order, and a ratio is taken within its round. A turn that other processes disturbed
is repeated. The median over rounds is printed with the quartiles.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import RESULTS, save
from steps import take_turns

import bayeslim as bl

BATCH = 128
NUM_DATA = 60_000
NETWORKS = {"mlp": "MLP 784-400-400-10", "lenet5": "LeNet-5"}
STEPS_PER_TURN = {"mlp": 10, "lenet5": 4}
"""Timed steps in one turn."""
MAX_RATIO_TO_SGD = 1.1
SGD = "SGD with momentum"
METHODS: dict[str, bl.Method] = {
    "sgld": bl.SGLD(),
    "sghmc": bl.SGHMC(),
    "sgnht": bl.SGNHT(),
    "psgld": bl.PSGLD(),
    "sghmc, adapted": bl.SGHMC(adapt=True),
}
PROMISED = ("sgld", "sghmc")
IN_LOSS = ", prior in the loss"


def build(network: str, device: str) -> dict[str, Callable[[], None]]:
    """Build a training step of every contender, on the same network and batch."""
    torch.manual_seed(0)
    model = bl.zoo.create(network).to(device)
    x, y = torch.rand(BATCH, 1, 28, 28, device=device), torch.randint(10, (BATCH,), device=device)

    def step_of(loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            if device != "cpu":
                torch.cuda.synchronize()

        return step

    own = copy.deepcopy(model)
    sgd = torch.optim.SGD(own.parameters(), lr=1e-3, momentum=0.9)
    steps = {SGD: step_of(lambda: F.cross_entropy(own(x), y), sgd)}
    for name, method in {**METHODS, **{name + IN_LOSS: METHODS[name] for name in PROMISED}}.items():
        bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical(), num_data=NUM_DATA)
        sampler = bnn.optimizer(lr=1e-4)
        if not name.endswith(IN_LOSS):
            sampler.param_groups[0]["weight_decay"] = bl.samplers.weight_decay(bnn)
        weight = 1.0 if name.endswith(IN_LOSS) else 0.0
        steps[name] = step_of(lambda bnn=bnn, weight=weight: bnn.loss((x, y), kl_weight=weight), sampler)
    return steps


def summary(times: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Compute median milliseconds, and the median and quartiles of the ratio to SGD."""
    rows = {}
    for name, turns in times.items():
        row: dict[str, float] = {"ms": 1e3 * statistics.median(seconds for seconds, _ in turns)}
        ratios = [mine / other for (mine, _), (other, _) in zip(turns, times[SGD], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        row |= {"ratio": middle, "low": low, "high": high}
        row["others"] = max(cores for _, cores in turns)
        rows[name] = {key: float(f"{value:.4g}") for key, value in row.items()} | {"rounds": len(turns)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="which networks")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seconds", type=float, default=30, help="time for each network (one round at least)")
    parser.add_argument("--patience", type=float, default=120, help="more seconds, for what others disturbed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results file")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for network in options.networks:
        steps = build(network, options.device)
        for step in steps.values():
            step()
        times = take_turns(steps, options.seconds, STEPS_PER_TURN[network], options.patience)
        results[network] = summary(times)
        print(f"\n{NETWORKS[network]} on {options.device} (ratio to SGD with momentum)")
        for name, row in results[network].items():
            print(f"  {name:<26}{row['ms']:>9.2f} ms {row['ratio']:>7.2f} ({row['low']:.2f} to {row['high']:.2f})")
    goals = [
        {"goal": f"{NETWORKS[n]}: {m} step / SGD step", "limit": MAX_RATIO_TO_SGD, "measured": rows[m]["ratio"],
         "met": rows[m]["ratio"] <= MAX_RATIO_TO_SGD}
        for n, rows in results.items() for m in PROMISED
    ]  # fmt: skip
    for goal in goals:
        print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['goal']}: {goal['measured']:.2f} (limit {goal['limit']})")
    name = "samplers" if options.device == "cpu" else f"samplers_{options.device}"
    report = {"batch": BATCH, "device": options.device, "results": results, "goals": goals}
    print(f"\nSaved {save(name, report, folder=options.results)}")


if __name__ == "__main__":
    main()
