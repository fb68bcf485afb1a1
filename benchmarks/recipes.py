"""Every recipe with its default settings on both LeNets, against magnitude.

    python benchmarks/recipes.py --device cuda --workers 20              all recipes, a few minutes on a GPU
    python benchmarks/recipes.py --recipes horseshoe --networks lenet5   a part of it

A dense network is trained. A recipe makes it sparse with its own method, training, cut and fine-tuning. Magnitude cuts
the same dense network with the same schedule: single weights to as many non-zeros, or units to the same shapes. For
recipes that cut nothing, the error, NLL and calibration of predictions are compared with those of the dense network.
There is no augmentation and no teacher. Finished runs are kept in the results.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from jobs import finished
from sparse_posteriors import DEFAULTS, Run, errors, nonzeros
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.prune.cuts import NothingToCut
from bayeslim.prune.fine_tune import means_alone

NETWORKS = ("lenet_300_100", "lenet5")
DRAWS = 32

Job = dict[str, Any]


def recipe_of(job: Job) -> bl.recipes.Recipe:
    """Make the recipe of a job; with fewer epochs for a quick check."""
    make = bl.recipes.RECIPES[job["recipe"]]
    return make(epochs=job["epochs"]) if "epochs" in job else make()


def run(job: Job) -> Job:
    """Train a dense network, apply a recipe to it, and magnitude pruning."""
    torch.set_num_threads(1)
    os.environ["BAYESLIM_PROGRESS"] = "0"
    started, recipe = time.monotonic(), recipe_of(job)
    tuning = {f"tune_{key}": value for key, value in recipe.fine_tune.items()}
    steps = Run({**DEFAULTS, **tuning, "data": "mnist", "rule": "recipe", **job, **recipe.fit})
    dense = steps.dense()
    bnn = bl.bayesianize(dense, likelihood=bl.likelihoods.Categorical(), **recipe)
    steps.train(bnn, recipe.fit["epochs"], recipe.fit["lr"], recipe.fit["lr_schedule"])
    result = {**job, "dense": errors(steps, dense)}
    result |= predictions(steps, dense, bnn) if recipe.budget is None else cut(steps, recipe, dense, bnn)
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def predictions(steps: Run, dense: nn.Module, bnn: bl.Bayesian) -> Job:
    """Score the predictions of the posterior and of the dense network."""
    images, labels = steps.test
    said = {"dense": dense(images).softmax(1).detach(), "average": bl.predict(bnn, images, samples=DRAWS).probs}
    return {"scores": {name: scores(probs, labels) for name, probs in said.items()}}


def scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute error and calibration error in per cent, NLL in nats."""
    found = {"error": 100 * bl.metrics.error(probs, labels), "nll": bl.metrics.nll(probs, labels)}
    found["ece"] = 100 * bl.metrics.expected_calibration_error(probs, labels)
    return {name: round(float(value), 4) for name, value in found.items()}


def cut(steps: Run, recipe: bl.recipes.Recipe, dense: nn.Module, bnn: bl.Bayesian) -> Job:
    """Cut and fine-tune by the recipe and by magnitude, and measure both."""
    assert recipe.budget is not None
    try:
        pruned = bl.prune(bnn, recipe.budget, **recipe.cut)
    except NothingToCut:
        pruned = bnn
    with means_alone(pruned):
        tuning = recipe.fine_tune
        steps.train(pruned, tuning["epochs"], tuning["lr"], tuning["lr_schedule"])
    pixels = steps.job["network"] == "lenet_300_100"
    slim = bl.compact(copy.deepcopy(pruned).cpu(), steps.valid[0][:4].cpu(), drop_inputs=pixels)
    shapes = {name: tuple(p.shape) for name, p in slim.named_parameters() if p.ndim > 1}
    network = pruned.mean_network()
    total, left = sum(p.numel() for p in dense.parameters() if p.ndim > 1), sum(nonzeros(network).values())
    result: Job = {"shapes": shapes, "nonzeros": left, "parameters": sum(math.prod(s) for s in shapes.values())}
    result |= {"weights": total, "sparse": errors(steps, network)}
    if not steps.job["baseline"]:
        return result
    of_units = recipe.cut["criterion"] == "gates"
    beside = steps.by_norm(dense, shapes) if of_units else steps.by_magnitude(dense, left)
    return result | {"magnitude": errors(steps, steps.tuned(beside.model, beside.masks))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=list(bl.recipes.RECIPES), default=list(bl.recipes.RECIPES))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, help="of every recipe, for a quick look")
    parser.add_argument("--no-magnitude", action="store_true", help="leave out magnitude, for a quick look")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    jobs: list[Job] = [
        {"recipe": recipe, "network": network, "seed": seed, "baseline": not options.no_magnitude}
        for seed in range(options.seeds)
        for network in options.networks[::-1]  # the longer runs first
        for recipe in options.recipes
    ]
    jobs = [job | ({"epochs": options.epochs} if options.epochs else {}) for job in jobs]
    jobs = [job | {"settings": repr(recipe_of(job)), "device": options.device} for job in jobs]
    path = options.results / "recipes.json"
    done = json.loads(path.read_text())["runs"] if path.exists() else []
    command = f"python benchmarks/recipes.py --device {options.device} --seeds {options.seeds}"

    def keep(result: Job) -> None:
        save("recipes", {"command": command, "runs": done}, folder=options.results)
        print(json.dumps({k: v for k, v in result.items() if k != "settings"}), flush=True)

    groups: dict[tuple[str, str], list[Job]] = {}
    for row in finished(run, jobs, done, options.workers, keep):
        groups.setdefault((row["network"], row["recipe"]), []).append(row)
    for group, rows in groups.items():
        print(*group, json.dumps(summary(rows)))


def summary(rows: list[Job]) -> dict[str, float]:
    """Average over seeds; compression is all weights over the mean of those left."""
    if "scores" in rows[0]:
        names = rows[0]["scores"]["dense"]
        parts = [(way, name) for way in ("dense", "average") for name in names]
        return {f"{way} {name}": statistics.mean(r["scores"][way][name] for r in rows) for way, name in parts}
    found = {key: rows[0]["weights"] / statistics.mean(r[key] for r in rows) for key in ("nonzeros", "parameters")}
    for rule in ("dense", "sparse", "magnitude"):
        if rule in rows[0]:
            found[rule] = statistics.mean(row[rule]["test"] for row in rows)
    return {name: round(value, 3) for name, value in found.items()}


if __name__ == "__main__":
    main()
