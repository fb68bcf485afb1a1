"""Pruning a Bayes-by-Backprop network by its posterior: MNIST, two hidden layers of 400 units, no retraining.

    python benchmarks/variational_pruning.py

The prior's standard deviation and the KL's temperature are chosen on 5,000 held-out training images: the smallest error
after cutting 95 % of the weights. With that setting the network is trained on all training images, once a seed, then
cut to 25, 50, 75, 90, 95 and 98 % by the signal-to-noise ratio |μ|/σ and, beside it, by the magnitude |μ| alone. Test
errors are of the mean of 32 samples. An interrupted run goes on where it was.

Blundell et al. 2015, arXiv:1505.05424, lose 0.05 points at 95 % and 0.15 at 98 % (1,200 units).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from torch import Tensor

import bayeslim as bl

SPARSITIES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98)
CRITERIA = ("snr", "magnitude")
SETTINGS = [{"temperature": temperature, "prior_std": 0.1} for temperature in (0.1, 0.3, 1.0)]


def trained(x: Tensor, y: Tensor, setting: dict[str, float], epochs: int, seed: int, folder: Path, device: str) -> Any:
    """The posterior, by a uniform KL weight; from its checkpoint if it was trained before."""
    torch.manual_seed(seed)
    bnn = bl.bayesianize(
        bl.zoo.create("mlp", hidden=400),
        bl.Variational(temperature=setting["temperature"]),
        likelihood=bl.likelihoods.Categorical(),
        prior=bl.priors.Normal(setting["prior_std"]),
    )
    loader = bl.data.Loader(x, y, batch_size=128, device=device, seed=seed)
    run = folder / f"{setting['temperature']:g}-{setting['prior_std']:g}-{epochs}-{seed}-{len(x)}"
    bnn.fit(loader, epochs=epochs, lr=1e-3, lr_schedule="cosine", seed=seed, device=device, checkpoint=run)
    return bnn


def error_after(bnn: bl.Bayesian, sparsity: float, criterion: str, x: Tensor, y: Tensor) -> float:
    """The error in per cent of what is left."""
    pruned = bl.prune(bnn, bl.Budget(sparsity=sparsity), criterion=criterion) if sparsity else bnn
    generator = torch.Generator(next(bnn.parameters()).device).manual_seed(0)
    wrong = bl.predict(pruned, x, generator=generator).classes.cpu() != y
    return round(100 * float(wrong.double().mean()), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--search-epochs", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/variational_pruning"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    data = bl.data.load("mnist")
    split = data.with_validation(5_000, seed=0)
    search = []
    for setting in SETTINGS:
        bnn = trained(split.train_x, split.train_y, setting, options.search_epochs, 100, options.runs, options.device)
        errors = {f"{s:g}": error_after(bnn, s, "snr", split.valid_x, split.valid_y) for s in SPARSITIES}
        search.append({**setting, "validation_error": errors})
        print(json.dumps(search[-1]), flush=True)
    best = min(search, key=lambda row: row["validation_error"]["0.95"])
    chosen = {key: best[key] for key in SETTINGS[0]}
    print(f"chosen on validation images: {chosen}", flush=True)
    seeds: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        bnn = trained(data.train_x, data.train_y, chosen, options.epochs, seed, options.runs, options.device)
        rows = {c: {f"{s:g}": error_after(bnn, s, c, data.test_x, data.test_y) for s in SPARSITIES} for c in CRITERIA}
        seeds.append(rows)
        print(json.dumps(rows), flush=True)
        mean = {c: {s: round(statistics.mean(rows[c][s] for rows in seeds), 3) for s in seeds[0][c]} for c in CRITERIA}
        save(
            "variational_pruning",
            {
                "command": "python benchmarks/variational_pruning.py",
                "settings": {k: v for k, v in vars(options).items() if k not in ("results", "runs")},
                "search": search,
                "chosen": chosen,
                "test_error": mean,
                "seeds": seeds,
            },
            folder=options.results,
        )


if __name__ == "__main__":
    main()
