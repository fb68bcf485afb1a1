"""Adversarial inputs against every method: does the uncertainty rise with the error?

    python benchmarks/adversarial.py                               MNIST, all methods, three seeds
    python benchmarks/adversarial.py --device cuda --workers 6
    python benchmarks/adversarial.py --data digits --methods laplace variational --seeds 1 --epochs 5

A network of two hidden layers of 200 units (with dropout for MC dropout, with batch norms for MC batch norm) is fitted
by each method. FGSM and PGD (ten steps) move 1,000 test images by at most ε in every pixel against the mean network.
The table has the error, the entropy and the mutual information of averaged predictions on clean and moved images, and
the AUROC of either score for telling them apart: above ½ the uncertainty rises.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from jobs import Job, finished
from torch import nn

import bayeslim as bl

METHODS: dict[str, bl.Method] = {
    "map": bl.Variational(bl.families.Point()),
    "variational": bl.Variational(),
    "ivon": bl.IVON(),
    "laplace": bl.Laplace(),
    "laplace last layer": bl.Laplace("full", subset="last-layer"),
    "mc dropout": bl.MCDropout(),
    "mc batch norm": bl.MCBatchNorm(),
    "ensemble": bl.DeepEnsemble(members=5),
    "snapshot": bl.Snapshot(cycles=5),
    "swag": bl.SWAG(),
    "multi-swag": bl.MultiSWAG(members=3),
    "svgd": bl.SVGD(particles=5),
    "sgld": bl.SGLD(samples=20),
    "sghmc": bl.SGHMC(samples=20),
}
OWN_LR = (bl.SGLD, bl.SGHMC, bl.IVON)
IMAGES = 1000
EPSILONS = (0.05, 0.1, 0.2)


def network(method: bl.Method, inputs: int) -> nn.Module:
    if isinstance(method, bl.MCDropout):
        return bl.zoo.mlp(200, inputs, dropout=0.3)
    if not isinstance(method, bl.MCBatchNorm):
        return bl.zoo.mlp(200, inputs)
    layers = [nn.Flatten(), nn.Linear(inputs, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 200)]
    return nn.Sequential(*layers, nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 10))


def work(job: Job) -> Job:
    """Fit a method and attack it."""
    torch.set_num_threads(1)
    method, device = METHODS[job["method"]], job["device"]
    data = bl.data.load(job["data"])
    torch.manual_seed(job["seed"])
    bnn = bl.bayesianize(network(method, data.train_x[0].numel()), method, likelihood=bl.likelihoods.Categorical()).to(
        device
    )
    loader = bl.data.Loader(data.train_x, data.train_y, batch_size=128, device=device, seed=job["seed"])
    lr = {} if isinstance(method, OWN_LR) else {"lr": 1e-3}
    bnn.fit(loader, epochs=job["epochs"], seed=job["seed"], progress=False, **lr)
    x, y = data.test_x[:IMAGES].to(device), data.test_y[:IMAGES].to(device)
    generator = torch.Generator().manual_seed(job["seed"])
    clean = bl.predict(bnn, x)
    rows = {"clean": scores(clean, clean, y)}
    for epsilon in EPSILONS:
        rows[f"fgsm {epsilon}"] = scores(bl.predict(bnn, bl.fgsm(bnn, x, y, epsilon, (0, 1))), clean, y)
        moved = bl.pgd(bnn, x, y, epsilon, (0, 1), generator=generator)
        rows[f"pgd {epsilon}"] = scores(bl.predict(bnn, moved), clean, y)
    return job | {"rows": rows}


def scores(found: bl.Prediction, clean: bl.Prediction, y: torch.Tensor) -> dict[str, float]:
    return {
        "error": float((found.classes != y).double().mean()),
        "entropy": float(found.entropy.mean()),
        "information": float(found.epistemic.mean()),
        "auroc_entropy": bl.metrics.auroc(clean.entropy.cpu(), found.entropy.cpu()),
        "auroc_information": bl.metrics.auroc(clean.epistemic.cpu(), found.epistemic.cpu()),
    }


def show(runs: list[Job]) -> None:
    print(f"{'':20}{'':11}{'error %':>9}{'entropy':>9}{'inform.':>9}{'AUROC H':>9}{'AUROC I':>9}")
    for name in METHODS:
        own = [run["rows"] for run in runs if run["method"] == name]
        for attack in own[0] if own else ():
            mean: Any = {key: statistics.fmean(rows[attack][key] for rows in own) for key in own[0][attack]}
            print(
                f"{name:20}{attack:11}{100 * mean['error']:9.1f}{mean['entropy']:9.3f}{mean['information']:9.3f}"
                f"{mean['auroc_entropy']:9.2f}{mean['auroc_information']:9.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20, help="a multiple of five, for the cycles of snapshots")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    path = options.results / "adversarial.json"
    done: list[Job] = json.loads(path.read_text())["runs"] if path.exists() else []
    settings = {"data": options.data, "epochs": options.epochs, "device": options.device}
    jobs = [{"method": m, "seed": s, **settings} for s in range(options.seeds) for m in options.methods]

    def each(result: Job) -> None:
        save("adversarial", {"runs": done}, folder=options.results)
        print(result["method"], result["seed"], flush=True)

    show(finished(work, jobs, done, options.workers, each))


if __name__ == "__main__":
    main()
