"""Variance networks, Bayesian model reduction and learned prior precisions, beside the library's other ways.

    python benchmarks/paper_methods.py --device cuda --workers 8 --minutes 4         both LeNets, repeat until complete
    python benchmarks/paper_methods.py --networks vgg --device cuda --minutes 8      the VGG-like network, likewise
    python benchmarks/paper_methods.py --parts relevance --networks lenet_300_100 --epochs 1 --seeds 1    a quick look

Three parts, each on the same data, network and number of epochs:

variance    `families.ZeroMean` in one hidden layer and in all of them (the last layer has means), and the mean field.
            The error and NLL of one draw and of 32, and the error of the mean network, which is at the level of chance.
reduction   Gates `TruncatedLogNormal` are trained from a dense network. Units are cut by the signal-to-noise ratio
            (threshold 1) or by the evidence ("bmrs", "bmrs_uniform", no threshold), and fine-tuned.
            `recipes.bottleneck` runs beside them.
relevance   A network is trained with one prior precision, or with those of layers, units or weights by the marginal
            likelihood. Then weights are cut by "opd" and by magnitude without retraining, and for the LeNets by the
            Kronecker posterior's joint solve from the first of these networks.

Finished jobs are kept in the results and not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import recipes
import torch
from environment import RESULTS, save
from jobs import finished
from sparse_posteriors import CIFAR, DEFAULTS, NETWORKS, Run, Shown, shown
from torch import nn

import bayeslim as bl

PARTS = ("variance", "reduction", "relevance")
LENETS = ("lenet_300_100", "lenet5")
DRAWS = 32
EPOCHS = {"variance": 100, "reduction": 100, "relevance": 60}
SPARSITIES = (0.9, 0.95, 0.98, 0.99)
SHARING = ("network", "layer", "unit", "weight")
STD_RATE = 20.0
"""The learning rate of log σ relative to that of means, for networks that learn little else."""
TUNINGS = 12
"""How many times the prior precisions are tuned during training."""
HIDDEN: dict[str, tuple[list[str], list[str]]] = {
    "lenet_300_100": (["fc1.weight"], ["fc1.weight", "fc2.weight"]),
    "lenet5": (["fc1.weight"], ["conv1.weight", "conv2.weight", "fc1.weight"]),
    "vgg": (["fc1.weight"], ["fc1.weight", "conv5_3.weight"]),
}
"""The layers of variance networks: one, and several."""
MNIST = {"data": "mnist", "tune_epochs": 30}

Job = dict[str, Any]


def run(job: Job) -> Job:
    """Run one part on one network and seed."""
    torch.set_num_threads(1)
    os.environ["BAYESLIM_PROGRESS"] = "0"
    started = time.monotonic()
    settings = CIFAR if job["network"] == "vgg" else MNIST
    steps = Run({**DEFAULTS, **settings, "rule": "recipe", **job})
    found = {"variance": variance, "reduction": reduction, "relevance": relevance}[job["part"]](steps)
    return {**job, "rows": found, "seconds": round(time.monotonic() - started, 1)}


def fresh(steps: Run) -> nn.Module:
    """Make an untrained network of the seed."""
    torch.manual_seed(steps.job["seed"])
    return bl.zoo.create(**NETWORKS[steps.job["network"]]).to(steps.device)


def train(steps: Run, bnn: bl.Bayesian, lr: float = 1e-3, **options: Any) -> bl.Bayesian:
    """Fit with the run's data, seed and augmentation."""
    data = Shown(steps.loader, partial(shown, **steps.moves))
    options = {"lr_schedule": "cosine", "seed": steps.job["seed"], "progress": False, **steps.options, **options}
    bnn.fit(data, epochs=steps.job["epochs"], lr=lr, **options)
    return bnn


def variance(steps: Run) -> list[Job]:
    """Train variance networks and the mean field."""
    one, several = HIDDEN[steps.job["network"]]
    free = bl.priors.LogUniform()
    zero_mean = bl.Variational(bl.families.ZeroMean(), std_rate=STD_RATE)
    ways: dict[str, tuple[bl.Method, Any, bl.priors.Prior]] = {
        "variances in one layer": (zero_mean, one, free),
        "variances in several layers": (zero_mean, several, free),
        "mean field": (bl.Variational(temperature=0.1), "weights", bl.priors.Normal(0.3)),
    }
    rows, (images, labels) = [], steps.test
    for name, (method, sites, prior) in ways.items():
        bnn = bl.bayesianize(fresh(steps), method, likelihood=bl.likelihoods.Categorical(), prior=prior, sites=sites)
        train(steps, bnn)
        row: Job = {"row": name, "mean": recipes.scores(probabilities(bnn.mean_network(), images), labels)}
        for draws in (1, DRAWS):
            generator = torch.Generator(images.device).manual_seed(steps.job["seed"])
            found = bl.predict(bnn, images, samples=draws, generator=generator).probs
            row[f"{draws} draws"] = recipes.scores(found, labels)
        rows.append(row)
    return rows


@torch.no_grad()
def probabilities(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Compute class probabilities in parts."""
    network.eval()
    return torch.cat([network(part).softmax(1) for part in images.split(1000)])


def reduction(steps: Run) -> list[Job]:
    """Train gates from a dense network, and cut units by four rules."""
    epochs = steps.job["epochs"]
    steps.job["baseline"] = False
    dense = steps.dense()
    base = bl.recipes.log_normal(epochs=epochs)
    assert isinstance(base.method, bl.Variational)
    # The rules alone decide: at the default threshold the mean network would close gates by their ratio as well.
    gate = bl.gates.TruncatedLogNormal(threshold=0.0)
    base = replace(base, method=replace(base.method, gates=gate, temperature=steps.job.get("temperature", 1.0)))
    rules = {
        name: replace(base, budget=bl.Budget(threshold=threshold), cut={"criterion": criterion})
        for name, (criterion, threshold) in {
            "signal to noise": ("gates", 1.0), "bmrs": ("bmrs", 0.0), "bmrs_uniform": ("bmrs_uniform", 0.0),
        }.items()
    }  # fmt: skip
    rows: list[Job] = [{"row": "dense", "sparse": recipes.errors(steps, dense)}]
    trained = _gated(steps, base, dense)
    for name, recipe in rules.items():
        rows.append({"row": name} | recipes.cut(steps, recipe, dense, copy.deepcopy(trained)))
    bottleneck = bl.recipes.bottleneck(epochs=epochs)
    rows.append({"row": "bottleneck"} | recipes.cut(steps, bottleneck, dense, _gated(steps, bottleneck, dense)))
    return rows


def _gated(steps: Run, recipe: bl.recipes.Recipe, dense: nn.Module) -> bl.Bayesian:
    bnn = bl.bayesianize(dense, likelihood=bl.likelihoods.Categorical(), **recipe)
    return steps.train(bnn, recipe.fit["epochs"], recipe.fit["lr"], recipe.fit["lr_schedule"])


def relevance(steps: Run) -> list[Job]:
    """Train with prior precisions of several kinds, and cut without retraining."""
    rows: list[Job] = []
    every = max(1, steps.job["epochs"] // TUNINGS)
    curvature = bl.data.Loader(*steps.taught, batch_size=1000, shuffle=False, device=steps.device)
    for per in SHARING:
        prior = bl.priors.Normal(0.3)
        bnn = bl.bayesianize(
            fresh(steps), bl.Laplace("diag"), likelihood=bl.likelihoods.Categorical(), prior=prior, sites="weights"
        )
        how: Job = {"tune": "evidence"} if per == "network" else {"tune": "online", "tune_every": every}
        train(steps, bnn, per=per, **how)
        rows += cuts(steps, bnn, f"per {per}", ("opd", "magnitude"))
        if per == "network" and steps.job["network"] != "vgg":  # there the joint solves take longer than the rest
            kron = bl.bayesianize(
                bnn.mean_network(), bl.Laplace(), likelihood=bl.likelihoods.Categorical(), prior=prior, sites="weights"
            )
            kron.fit(curvature, seed=0, progress=False)
            rows += cuts(steps, kron, "Kronecker, joint", ("curvature",))
    return rows


def cuts(steps: Run, bnn: bl.Bayesian, name: str, criteria: tuple[str, ...]) -> list[Job]:
    """Measure the test errors of one network after cuts by several criteria."""
    whole = steps.error(bnn.mean_network(), "test")
    rows = []
    for criterion in criteria:
        row: Job = {"row": f"{name}, {criterion}", "dense": whole}
        for sparsity in SPARSITIES:
            pruned = bl.prune(bnn, bl.Budget(sparsity=sparsity), criterion=criterion)
            row[f"{100 * sparsity:g} %"] = steps.error(pruned.mean_network(), "test")
        rows.append(row)
    return rows


def show(result: Job) -> None:
    """Print the rows of a job."""
    print(f"{result['part']}, {result['network']}, seed {result['seed']}: {result['seconds']} s")
    for row in result["rows"]:
        print("  ", json.dumps({key: value for key, value in row.items() if key != "shapes"}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--networks", nargs="+", choices=(*LENETS, "vgg"), default=LENETS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="of every part, for a quick look")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="start no job after this time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    jobs: list[Job] = []
    for seed in range(options.seeds):
        for network in reversed(options.networks):  # the longer jobs first
            for part in options.parts:
                epochs = options.epochs or (CIFAR["epochs"] if network == "vgg" else EPOCHS[part])
                jobs.append({"part": part, "network": network, "seed": seed, "epochs": epochs})
    jobs = [job | {"device": options.device} for job in jobs]
    path = options.results / "paper_methods.json"
    done = json.loads(path.read_text())["runs"] if path.exists() else []

    def keep(result: Job) -> None:
        show(result)
        save("paper_methods", {"runs": done}, folder=options.results)

    found = finished(run, jobs, done, options.workers, keep, options.minutes)
    print(f"{len(found)} of {len(jobs)} jobs are done: {path}")


if __name__ == "__main__":
    main()
