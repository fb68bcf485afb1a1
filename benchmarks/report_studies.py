"""Choices of Bayes by Backprop on MNIST: KL weights, priors and pixel scales.

    python benchmarks/report_studies.py                     one seed, 20 epochs, on a CPU
    python benchmarks/report_studies.py --device cuda --epochs 100 --seeds 3 --workers 10

The network has two layers of 400 units. One choice changes at a time: Blundell's KL weights or a uniform one; Gaussian
or scale-mixture priors (π, σ₁, σ₂); and pixels divided by 126, as in the paper, by 255, or standardised. All else is
equal: Adam at 1e-3 with a cosine schedule, local
noise, the last epoch's network, 32 samples. Histograms of the means over training are kept for one run of each kind of
prior. Nothing is chosen here, so every run is measured on the test set. Finished runs are not repeated.

Blundell et al. 2015, arXiv:1505.05424
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from jobs import finished
from torch import Tensor

import bayeslim as bl

MIXTURE = [0.5, 1.0, math.exp(-6)]
BASE: dict[str, Any] = {"schedule": "blundell", "prior": MIXTURE, "pixels": "126"}
STUDIES: dict[str, dict[str, dict[str, Any]]] = {
    "KL weights": {"Blundell's": {}, "uniform": {"schedule": "uniform"}},
    "priors": {
        "mixture (1/2, 1, e^-6)": {},
        "mixture (1/2, 1, e^-8)": {"prior": [0.5, 1.0, math.exp(-8)]},
        "mixture (1/4, 1, e^-6)": {"prior": [0.25, 1.0, math.exp(-6)]},
        "Gaussian (1)": {"prior": [1.0]},
        "Gaussian (0.2)": {"prior": [0.2]},
    },
    "pixels": {"/ 126": {}, "/ 255": {"pixels": "255"}, "standardised": {"pixels": "standardised"}},
}
SCHEDULES = {"uniform": bl.schedules.Uniform(), "blundell": bl.schedules.Blundell()}
EDGES = torch.linspace(-0.5, 0.5, 101)


def scaled(x: Tensor, how: str) -> Tensor:
    """Scale pixels in [0, 1] as in a study."""
    if how == "standardised":
        return (x - 0.1307) / 0.3081
    return x * (255 / float(how))


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train once, with histograms of the means after some epochs."""
    device = job["device"]
    torch.manual_seed(job["seed"])
    data = bl.data.load("mnist")
    prior = bl.priors.Normal(*job["prior"]) if len(job["prior"]) == 1 else bl.priors.ScaleMixture(*job["prior"])
    bnn = bl.bayesianize(
        bl.zoo.create("mlp", hidden=400),
        bl.Variational(
            bl.families.DiagonalGaussian(initial_std=0.01), kl_schedule=SCHEDULES[job["schedule"]], std_rate=1.0
        ),
        likelihood=bl.likelihoods.Categorical(),
        prior=prior,
    )
    histograms = {}

    def look(epoch: Any) -> None:
        if epoch.number in (1, 2, 5, 10, 20, 50, 100):
            means = torch.cat([bnn.model.get_parameter(name).detach().flatten().cpu() for name in bnn.sites.names])
            histograms[epoch.number] = torch.histogram(means, EDGES).hist.int().tolist()

    loader = bl.data.Loader(
        scaled(data.train_x, job["pixels"]), data.train_y, batch_size=128, device=device, seed=job["seed"]
    )
    started = time.monotonic()
    bnn.fit(
        loader,
        epochs=job["epochs"],
        lr=1e-3,
        lr_schedule="cosine",
        seed=job["seed"],
        device=device,
        callbacks=[look],
        progress=False,
    )
    measured = bl.metrics.Classification()
    generator = torch.Generator(device).manual_seed(0)
    measured.update(bl.predict(bnn, scaled(data.test_x, job["pixels"]), generator=generator).probs.cpu(), data.test_y)
    result = measured.compute()
    scores = {"error": round(100 * result.error, 3), "nll": round(result.nll, 5), "ece": round(100 * result.ece, 3)}
    return {**job, **scores, "seconds": round(time.monotonic() - started, 1), "histograms": histograms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    file = options.results / "report_studies.json"
    done: list[dict[str, Any]] = json.loads(file.read_text())["runs"] if file.exists() else []
    settings = {"epochs": options.epochs, "seeds": options.seeds}

    def keep(**table: Any) -> None:
        save("report_studies", {**settings, **table, "edges": EDGES.tolist(), "runs": done}, folder=options.results)

    def each(run: dict[str, Any]) -> None:
        keep()
        print({key: value for key, value in run.items() if key != "histograms"}, flush=True)

    common = {"epochs": options.epochs, "device": options.device}
    cases = {(study, case): BASE | changes for study, own in STUDIES.items() for case, changes in own.items()}
    jobs = [{**settings, **common, "seed": seed} for seed in range(options.seeds) for settings in _distinct(cases)]
    finished(train, jobs, done, options.workers, each)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for (study, case), chosen in cases.items():
        own = [r for r in done if r["epochs"] == options.epochs and all(r[key] == v for key, v in chosen.items())]
        row = {key: round(statistics.mean(r[key] for r in own), 4) for key in ("error", "nll", "ece")}
        table.setdefault(study, {})[case] = row | {"errors": [r["error"] for r in sorted(own, key=lambda r: r["seed"])]}
        print(f"{study}, {case}: {table[study][case]}")
    keep(table=table)


def _distinct(cases: dict[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """List every setting once: the base belongs to all studies."""
    return [s for i, s in enumerate(cases.values()) if s not in list(cases.values())[:i]]


if __name__ == "__main__":
    main()
