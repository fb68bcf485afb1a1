"""Bayes by Backprop on MNIST: a Gaussian prior, two hidden layers of 400 units.

    python benchmarks/bayes_by_backprop.py --device cuda

There are three objectives: the ELBO with the same KL weight in every minibatch; the ELBO with Blundell's weights, which
put most of an epoch's KL in its first minibatches; and a cold posterior, whose KL counts less. The prior's standard
deviation, and the temperature of the cold posterior, are chosen by the log-likelihood of 10,000 validation images held
out of the training set. The network is then trained on all 60,000 images with that setting, once for each seed, and
measured on the test set once, after the last epoch. Finished runs are kept in the results file and not repeated, so an
interrupted benchmark resumes.

Blundell et al. 2015, arXiv:1505.05424, report 1.82 % for this network, prior and data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from jobs import finished

import bayeslim as bl

SCHEDULES = {"uniform": bl.schedules.Uniform(), "blundell": bl.schedules.Blundell()}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train once, and measure on the validation or the test part."""
    torch.manual_seed(job["seed"])
    data = bl.data.load("mnist")
    if job["validation"]:
        data = data.with_validation(10_000, seed=0)
        held_x, held_y = data.valid_x, data.valid_y
    else:
        held_x, held_y = data.test_x, data.test_y
    device = job["device"]
    loader = bl.data.Loader(data.train_x, data.train_y, batch_size=job["batch"], device=device, seed=job["seed"])
    bnn = bl.bayesianize(
        bl.zoo.create("mlp", hidden=job["units"]),
        bl.Variational(
            bl.families.DiagonalGaussian(initial_std=0.01),
            estimator=job["estimator"],
            temperature=job["temperature"],
            kl_schedule=SCHEDULES[job["schedule"]],
            std_rate=1.0,
        ),
        likelihood=bl.likelihoods.Categorical(),
        prior=bl.priors.Normal(job["prior_std"]),
    )
    started = time.monotonic()
    fit = bnn.fit(
        loader,
        epochs=job["epochs"],
        lr=job["lr"],
        lr_schedule="cosine",
        device=device,
        seed=job["seed"],
        progress=False,
    )
    seconds = time.monotonic() - started
    torch.manual_seed(0)
    scores = {}
    for how in ("sample", "mean"):
        prediction = bl.predict(bnn, held_x, samples=job["samples"], how=how)
        measured = bl.metrics.Classification()
        measured.update(prediction.probs.cpu(), held_y)
        result = measured.compute()
        scores[how] = {"error": result.error, "nll": result.nll, "ece": result.ece}
    last = {k: v for k, v in fit.history[-1].items() if k in ("nll", "kl", "loss")}
    return {**job, **scores, "last_epoch": last, "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--units", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--search-epochs", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    common = {
        "device": options.device, "units": options.units, "batch": 128, "lr": 1e-3, "estimator": "local", "samples": 64,
    }  # fmt: skip
    path = options.results / "bayes_by_backprop.json"
    stored = json.loads(path.read_text()) if path.exists() else {"runs": []}
    done: list[dict[str, Any]] = stored["runs"]

    def keep(**summary: Any) -> None:
        content = {
            "command": f"python benchmarks/bayes_by_backprop.py --device {options.device}",
            "settings": {k: v for k, v in vars(options).items() if k != "results"},
        }
        save("bayes_by_backprop", {**content, **summary, "runs": done}, folder=options.results)

    def each(run: dict[str, Any]) -> None:
        keep()
        print(
            f"temperature {run['temperature']:g}, prior std {run['prior_std']:g}, seed {run['seed']}, "
            f"{run['epochs']} epochs: "
            f"{'validation' if run['validation'] else 'test'} error {100 * run['sample']['error']:.2f} % "
            f"(mean network {100 * run['mean']['error']:.2f} %), {run['seconds']:.0f} s",
            flush=True,
        )

    grids = {
        "exact": [("uniform", 1.0, std) for std in (0.03, 0.05, 0.1, 0.2, 0.5, 1.0)],
        "blundell": [("blundell", 1.0, std) for std in (0.1, 0.2, 0.5, 1.0)],
        "cold": [("uniform", temperature, std) for temperature in (0.3, 0.1, 0.03, 0.01) for std in (0.1, 0.2, 0.5)],
    }
    summary: dict[str, Any] = {}
    for label, grid in grids.items():
        search = [
            dict(zip(("schedule", "temperature", "prior_std"), setting, strict=True))
            | {**common, "seed": 100, "epochs": options.search_epochs, "validation": True}
            for setting in grid
        ]
        best = min(finished(train, search, done, options.workers, each), key=lambda run: run["sample"]["nll"])
        chosen = {key: best[key] for key in ("schedule", "temperature", "prior_std")}
        print(f"{label}: chosen on validation data {chosen}", flush=True)
        final = [
            {**common, **chosen, "seed": seed, "epochs": options.epochs, "validation": False}
            for seed in range(options.seeds)
        ]
        results = finished(train, final, done, options.workers, each)
        errors = [round(100 * run["sample"]["error"], 4) for run in results]
        mean, spread = statistics.mean(errors), statistics.stdev(errors) if len(errors) > 1 else 0.0
        summary[label] = {**chosen, "test_error_percent": {"mean": mean, "std": spread, "all": errors}}
        keep(summary=summary)
        print(f"{label}: test error {mean:.2f} ± {spread:.2f} % over {len(errors)} seeds", flush=True)


if __name__ == "__main__":
    main()
