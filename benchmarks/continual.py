"""Learning tasks one after the other: permuted and split MNIST.

    python benchmarks/continual.py --device cuda

Permuted MNIST: every task is all of MNIST under its own permutation of the pixels. Split MNIST: the digits in five
pairs, each classified by the same two outputs. After the last task the accuracy is averaged over the test sets of all
tasks.

    nothing      plain training on each task in turn, without a penalty
    ewc          elastic weight consolidation: a diagonal penalty for every task around its own optimum
    online ewc   one diagonal penalty around the latest optimum
    kron         online Kronecker-factored Laplace (Ritter, Botev & Barber 2018: about 90 % after 50 permuted tasks)

The strength of each penalty is chosen on validation images of a shorter run. Two hidden layers of 100 units.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from jobs import finished

import bayeslim as bl
from bayeslim import continual

RULES: dict[str, dict[str, Any]] = {
    "nothing": {"structure": "diag", "strengths": [1.0]},
    "ewc": {"structure": "diag", "centre": "product", "strengths": [1.0, 10.0, 100.0]},
    "online ewc": {"structure": "diag", "centre": "latest", "strengths": [1.0, 10.0, 100.0]},
    "kron": {"structure": "kron", "centre": "latest", "strengths": [1.0, 3.0, 10.0]},
}

Part = tuple[torch.Tensor, torch.Tensor]


def tasks(kind: str, count: int, validation: bool) -> list[Callable[[], tuple[Part, Part]]]:
    """List functions that make the training and the held-out data of each task."""
    data = bl.data.load("mnist")
    if validation:
        data = data.with_validation(10_000, seed=0)
    train = (data.train_x.flatten(1), data.train_y)
    held = (data.valid_x.flatten(1), data.valid_y) if validation else (data.test_x.flatten(1), data.test_y)
    if kind == "split":
        pairs = [(2 * i, 2 * i + 1) for i in range(min(count, 5))]

        def only(part: Part, pair: tuple[int, int]) -> Part:
            chosen = (part[1] == pair[0]) | (part[1] == pair[1])
            return part[0][chosen], part[1][chosen] - pair[0]

        return [partial(lambda pair: (only(train, pair), only(held, pair)), pair) for pair in pairs]
    generator = torch.Generator().manual_seed(0)
    orders = [torch.arange(784), *(torch.randperm(784, generator=generator) for _ in range(count - 1))]
    return [
        partial(lambda order: ((train[0][:, order], train[1]), (held[0][:, order], held[1])), order) for order in orders
    ]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Learn all tasks in turn, and measure on all of them."""
    os.environ["BAYESLIM_PROGRESS"] = "0"
    started, device = time.monotonic(), job["device"]
    torch.manual_seed(job["seed"])
    rule = RULES[job["rule"]]
    sequence = tasks(job["kind"], job["tasks"], job["validation"])
    network = bl.zoo.create("mlp", hidden=100, classes=2 if job["kind"] == "split" else 10).to(device)
    bnn = bl.bayesianize(
        network, bl.Laplace(structure=rule["structure"]), likelihood=bl.likelihoods.Categorical()
    )  # the prior is N(0, 1)
    training = {"epochs": job["epochs"], "lr": 1e-3, "seed": job["seed"], "progress": False}
    for index, task in enumerate(sequence):
        train, _ = task()
        loader = bl.data.Loader(*train, batch_size=256, device=device, seed=job["seed"])
        if index == 0 or job["rule"] == "nothing":
            bnn.fit(loader, **training)
        else:
            bnn = continual.update(bnn, loader, strength=job["strength"], centre=rule["centre"], **training)
    accuracies = []
    for task in sequence:
        _, (x, y) = task()
        prediction = bl.predict(bnn, x, how="mean")
        accuracies.append(float((prediction.classes.cpu() == y).double().mean()))
    mean = sum(accuracies) / len(accuracies)
    return {**job, "accuracy": mean, "by_task": accuracies, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kinds", nargs="+", default=["permuted", "split"])
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--search-tasks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    path = options.results / "continual.json"
    done: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []

    def keep(summary: dict[str, Any]) -> None:
        content = {
            "command": f"python benchmarks/continual.py --device {options.device}",
            "settings": {k: v for k, v in vars(options).items() if k != "results"},
            "summary": summary,
            "runs": done,
        }
        save("continual", content, folder=options.results)

    def each(result: dict[str, Any]) -> None:
        keep({})
        kind = "validation" if result["validation"] else "test"
        print(
            f"{result['kind']} MNIST, {result['tasks']} tasks, {result['rule']} x{result['strength']:g}: "
            f"{kind} accuracy {100 * result['accuracy']:.2f} % ({result['seconds']} s)",
            flush=True,
        )

    common = {"device": options.device, "epochs": options.epochs}
    search = [
        {**common, "kind": kind, "rule": rule, "strength": s, "tasks": options.search_tasks, "seed": 100,
         "validation": True}
        for kind in options.kinds for rule, settings in RULES.items() if len(settings["strengths"]) > 1
        for s in settings["strengths"]
    ]  # fmt: skip
    found = finished(run, search, done, options.workers, each)
    final = []
    for kind in options.kinds:
        for rule, settings in RULES.items():
            tried = [r for r in found if r["kind"] == kind and r["rule"] == rule]
            best = max(tried, key=lambda r: r["accuracy"])["strength"] if tried else settings["strengths"][0]
            count = 5 if kind == "split" else options.tasks
            final += [
                {**common, "kind": kind, "rule": rule, "strength": best, "tasks": count, "seed": seed,
                 "validation": False}
                for seed in range(options.seeds)
            ]  # fmt: skip
    results = finished(run, final, done, options.workers, each)
    summary: dict[str, Any] = {}
    for result in results:
        entry = summary.setdefault(result["kind"], {}).setdefault(result["rule"], {"accuracies_percent": []})
        entry["strength"], entry["tasks"] = result["strength"], result["tasks"]
        entry["accuracies_percent"].append(round(100 * result["accuracy"], 2))
    keep(summary)
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
