"""Pruning of Bayes-by-Backprop networks by their posterior, without retraining.

    python benchmarks/variational_pruning.py

Networks with two hidden layers of 400 units are trained on 55,000 images of MNIST under a Gaussian and a log-uniform
prior, at several temperatures of the KL. For each prior, the temperature is chosen on the other 5,000 images: the
smallest error after cutting 95 % of the weights. These networks, one for each seed, are cut to 25, 50, 75, 90, 95 and
98 % by the signal-to-noise ratio |μ|/σ and by the magnitude |μ|. Test errors are of the mean of 32 samples. Trained
networks are kept and not trained again.

Blundell et al. 2015, arXiv:1505.05424, lose 0.05 points at 95 % and 0.15 at 98 % (1,200 units).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from environment import RESULTS, save
from torch import Tensor

import bayeslim as bl

SPARSITIES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98)
CRITERIA = ("snr", "magnitude")
PRIORS = {"gaussian": bl.priors.Normal(0.1), "log-uniform": bl.priors.LogUniform()}
TEMPERATURES = {"gaussian": (0.3, 1.0), "log-uniform": (0.1, 1.0)}
WARMUP_EPOCHS = 5

Job = dict[str, Any]


def trained(job: Job) -> bl.Bayesian:
    """Train the posterior of one setting and seed, or load it from its folder."""
    folder = Path(job["runs"]) / f"{job['prior']}-{job['temperature']:g}-{job['epochs']}-{job['seed']}"
    if (folder / "network").exists():
        network: bl.Bayesian = bl.load(folder / "network")
        return network
    torch.manual_seed(job["seed"])
    data = split()
    bnn = bl.bayesianize(
        bl.zoo.create("mlp", hidden=400),
        bl.Variational(
            bl.families.DiagonalGaussian(initial_std=0.01),
            temperature=job["temperature"],
            kl_schedule=bl.schedules.Warmup(WARMUP_EPOCHS),
            std_rate=1.0,
        ),
        likelihood=bl.likelihoods.Categorical(),
        prior=PRIORS[job["prior"]],
    )
    device = job["device"]
    loader = bl.data.Loader(data.train_x, data.train_y, batch_size=128, device=device, seed=job["seed"])
    options = {"epochs": job["epochs"], "lr": 1e-3, "lr_schedule": "cosine", "seed": job["seed"], "device": device}
    bnn.fit(loader, checkpoint=folder / "checkpoint", progress=False, **options)
    bl.save(bnn, folder / "network")
    return bnn


def measure(job: Job) -> Job:
    """Measure errors in per cent after each cut, on validation or test images."""
    torch.set_num_threads(1)
    bnn, data = trained(job), split()
    x, y = (data.test_x, data.test_y) if job["part"] == "test" else (data.valid_x, data.valid_y)
    criteria = CRITERIA if job["part"] == "test" else CRITERIA[:1]
    errors = {c: {f"{s:g}": error_after(bnn, s, c, x, y) for s in SPARSITIES} for c in criteria}
    print(job["prior"], job["temperature"], job["seed"], job["part"], json.dumps(errors), flush=True)
    return {**{key: job[key] for key in ("prior", "temperature", "seed", "part")}, "errors": errors}


def split() -> bl.data.Dataset:
    """Load MNIST with 5,000 validation images."""
    return bl.data.load("mnist").with_validation(5_000, seed=0)


def error_after(bnn: bl.Bayesian, sparsity: float, criterion: str, x: Tensor, y: Tensor) -> float:
    """Prune, and compute the error in per cent."""
    pruned = bl.prune(bnn, bl.Budget(sparsity=sparsity), criterion=criterion) if sparsity else bnn
    generator = torch.Generator(next(bnn.parameters()).device).manual_seed(0)
    wrong = bl.predict(pruned, x, generator=generator).classes.cpu() != y
    return round(100 * float(wrong.double().mean()), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/variational_pruning"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    common = {"epochs": options.epochs, "device": options.device, "runs": str(options.runs)}
    with mp.get_context("spawn").Pool(options.workers) as pool:
        search = pool.map(
            measure,
            [
                {**common, "prior": prior, "temperature": temperature, "seed": 0, "part": "validation"}
                for prior, temperatures in reversed(TEMPERATURES.items())
                for temperature in temperatures
            ],
            chunksize=1,
        )
        chosen = {}
        for prior in PRIORS:
            rows = [row for row in search if row["prior"] == prior]
            chosen[prior] = min(rows, key=lambda row: row["errors"]["snr"]["0.95"])["temperature"]
        print(f"temperatures chosen on validation images: {chosen}", flush=True)
        final = pool.map(
            measure,
            [
                {**common, "prior": prior, "temperature": temperature, "seed": seed, "part": "test"}
                for prior, temperature in chosen.items()
                for seed in range(options.seeds)
            ],
            chunksize=1,
        )
    table = {
        prior: {
            c: {
                s: round(statistics.mean(row["errors"][c][s] for row in final if row["prior"] == prior), 3)
                for s in final[0]["errors"][c]
            }
            for c in CRITERIA
        }
        for prior in PRIORS
    }
    content = {
        "command": f"python benchmarks/variational_pruning.py --device {options.device} --epochs {options.epochs} "
        f"--seeds {options.seeds}",
        "settings": {k: v for k, v in vars(options).items() if k not in ("results", "runs")},
        "temperatures": chosen,
        "test_error": table,
        "search": search,
        "runs": final,
    }
    print(json.dumps(table, indent=1))
    print(save("variational_pruning", content, folder=options.results))


if __name__ == "__main__":
    main()
