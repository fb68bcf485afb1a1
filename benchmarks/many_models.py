"""Every way to be Bayesian on one backbone: what each costs, how well it knows what it does not know, and its student.

    python benchmarks/many_models.py                                     on a CPU, some hours
    python benchmarks/many_models.py --device cuda --workers 10          on a GPU, some minutes
    python benchmarks/many_models.py --methods map swag --seeds 1        a part of it

MNIST, two hidden layers of 200 units: test error, negative log-likelihood, calibration error, and how well the
predictive entropy tells digits from KMNIST, notMNIST and Fashion-MNIST (AUROC). Two UCI sets, one hidden layer of 50
units: root mean squared error and negative log-likelihood in the targets' units, seeds being published splits. Every
posterior over MNIST is then distilled into one plain network (`bl.distill`), taught on the training images and on
shifted copies of them.

Costs are relative to those of the one network trained as usual ("map") in the same run: seconds of training, where a
method that starts from a trained network counts that too, and passes of the plain network that a prediction takes, in
turns. Settings are usual ones and were not tuned, but for cyclical SGHMC: six pairs of rate and temperature were tried
on validation images, and its rate for regression was lowered after a run that diverged. Snapshots, SWAG and SGHMC train
for twice the epochs of the others. Finished runs are kept and not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from jobs import finished
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.errors import BayeslimWarning

OTHERS = ("kmnist", "notmnist", "fashion-mnist")
REGRESSIONS = ("concrete", "energy")
TRAINED_FIRST = ("swag", "subnetwork sgld", "laplace")
EPOCHS = {"mnist": 20, "concrete": 200, "energy": 200}
BATCH = {"mnist": 256, "concrete": 32, "energy": 32}
PRIOR = {"mnist": 0.3, "concrete": 1.0, "energy": 1.0}
PASSES = 8
"""Of the plain network in a row, when they are timed."""
SHIFTS = ((0, 1), (1, 0), (0, -1), (-1, 0))
"""How far the copies of images are moved that students see besides the training images, in pixels."""

Job = dict[str, Any]


def method_of(name: str, data: str) -> tuple[bl.Method, dict[str, Any]]:
    """A method, and how it is fitted."""
    epochs, images = EPOCHS[data], data == "mnist"
    lr = 1e-3 if images else 3e-3
    cosine = {"epochs": epochs, "lr": lr, "lr_schedule": "cosine"}
    temperature = 0.1 if images else 1.0
    table: dict[str, tuple[bl.Method, dict[str, Any]]] = {
        "map": (bl.DeepEnsemble(members=1), cosine),
        "mc dropout": (bl.MCDropout(), cosine),
        "deep ensemble": (bl.DeepEnsemble(members=5), cosine),
        "snapshot": (bl.Snapshot(cycles=5), {"epochs": 2 * epochs, "lr": lr}),
        "swag": (bl.SWAG(), {"epochs": epochs, "lr": lr}),
        "cyclical sghmc": (
            bl.SGHMC(schedule="cyclical", cycles=4, samples=20, temperature=temperature),
            {"epochs": 2 * epochs, "lr": 0.2 if images else 1e-3},
        ),
        "subnetwork sgld": (
            bl.SGLD(subset=bl.Subnetwork(1_000 if images else 100), samples=20),
            {"epochs": epochs // 4, "lr": 0.1 if images else 1e-3},
        ),
        "variational": (bl.Variational(temperature=temperature), cosine),
        "laplace": (bl.Laplace(), {"tune": "evidence"}),
    }  # fmt: skip
    return table[name]


METHODS = (
    "map", "mc dropout", "deep ensemble", "snapshot", "swag", "cyclical sghmc", "subnetwork sgld", "variational",
    "laplace",
)  # fmt: skip


def network_of(job: Job, inputs: int) -> nn.Module:
    """The backbone; with dropout where that is the method."""
    shape = {"hidden": 200} if job["data"] == "mnist" else {"hidden": 50, "inputs": inputs, "classes": 1, "depth": 1}
    return bl.zoo.create("mlp", dropout=0.2 if job["method"] == "mc dropout" else 0.0, **shape)


def load(job: Job) -> bl.data.Dataset:
    """The data of a run: regression has a split for every seed."""
    return bl.data.load("mnist") if job["data"] == "mnist" else bl.data.load(job["data"], split=job["seed"])


def fitted(job: Job, data: bl.data.Dataset) -> bl.Bayesian:
    """The posterior of a run."""
    name, device = job["data"], job["device"]
    torch.manual_seed(job["seed"])
    likelihood = bl.likelihoods.Categorical() if name == "mnist" else bl.likelihoods.Gaussian("learned")
    network = network_of(job, data.train_x[0].numel()).to(device)
    prior = bl.priors.Normal(PRIOR[name])
    if job["method"] in TRAINED_FIRST:
        plain, options = method_of("map", name)
        first = bl.bayesianize(network, plain, likelihood=likelihood, prior=prior)
        first.fit(loader_of(job, data), seed=job["seed"], progress=False, **options)
        network, likelihood = first.mean_network(), first.likelihood
    method, options = method_of(job["method"], name)
    bnn = bl.bayesianize(network, method, likelihood=likelihood, prior=prior)
    bnn.fit(loader_of(job, data), seed=job["seed"], progress=False, **options)
    return bnn


def loader_of(job: Job, data: bl.data.Dataset) -> bl.data.Loader:
    """The training data in batches."""
    size = BATCH[job["data"]]
    return bl.data.Loader(data.train_x, data.train_y, batch_size=size, device=job["device"], seed=job["seed"])


def run(job: Job) -> Job:
    """Train, measure, distil, measure."""
    os.environ["BAYESLIM_PROGRESS"] = "0"
    warnings.simplefilter("ignore", BayeslimWarning)  # pixels that are never inked leave weights without a say
    data, started = load(job), time.monotonic()
    bnn = fitted(job, data)
    result = {**job, "train_seconds": round(time.monotonic() - started, 2), **scores(bnn, data, job["seed"])}
    if job["data"] == "mnist" and job["method"] != "map":
        more = torch.cat([torch.roll(data.train_x, shift, (2, 3)) for shift in SHIFTS])
        student = bl.distill(
            bnn,
            loader_of(job, data),
            network_of({**job, "method": "map"}, 784).to(job["device"]),
            unlabelled=more.to(job["device"]),
            epochs=EPOCHS["mnist"] // 2,
            lr=1e-3,
            lr_schedule="cosine",
            seed=job["seed"],
            progress=False,
        )
        result["student"] = student_scores(student, data, job["device"])
    return result


def scores(bnn: bl.Bayesian, data: bl.data.Dataset, seed: int) -> dict[str, float]:
    """What a posterior's predictions are worth."""
    device = next(bnn.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)

    def predicted(x: Tensor) -> bl.Prediction:
        return bl.predict(bnn, x.to(device), batch_size=2_000, generator=generator)

    found = predicted(data.test_x)
    if data.num_classes is None:
        scale = float(data.target_scale.std)
        regression = bl.metrics.Regression()
        regression.update(found.mean.cpu() * scale, found.variance.cpu() * scale**2, data.test_y * scale)
        values = regression.compute()
        return {"rmse": values.rmse, "nll": values.nll}
    outside = {other: predicted(bl.data.load(other, part="test").test_x).entropy.cpu() for other in OTHERS}
    assert found.probs is not None
    return classified(found.probs.cpu(), data.test_y, found.entropy.cpu(), outside)


def student_scores(student: nn.Module, data: bl.data.Dataset, device: str) -> dict[str, float]:
    """The same of one plain network."""

    @torch.no_grad()
    def predicted(x: Tensor) -> Tensor:
        return torch.cat([student(part.to(device)).softmax(-1) for part in x.split(2_000)]).cpu()

    def entropy(probs: Tensor) -> Tensor:
        return torch.special.entr(probs).sum(-1)

    probs = predicted(data.test_x)
    outside = {other: entropy(predicted(bl.data.load(other, part="test").test_x)) for other in OTHERS}
    return classified(probs, data.test_y, entropy(probs), outside)


def classified(probs: Tensor, y: Tensor, entropy: Tensor, outside: dict[str, Tensor]) -> dict[str, float]:
    """Error and calibration error in per cent, NLL, and AUROC against other images."""
    measured = bl.metrics.Classification()
    measured.update(probs, y)
    values = measured.compute()
    row = {"error": 100 * values.error, "nll": values.nll, "ece": 100 * values.ece}
    return row | {name: 100 * bl.metrics.auroc(entropy, other) for name, other in outside.items()}


def passes(methods: Sequence[str], device: str) -> dict[str, float]:
    """How many passes of the plain network a prediction of the MNIST test images takes, by the clock, in turns.

    That does not depend on what was learned, so a few images are enough to learn from.
    """
    data = bl.data.load("mnist")
    few, x = replace(data, train_x=data.train_x[:2_560], train_y=data.train_y[:2_560]), data.test_x.to(device)

    def seconds(action: Callable[[], Any]) -> float:
        started = time.perf_counter()
        action()
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    found = {}
    for method in methods:
        job = {"data": "mnist", "method": method, "seed": 0, "device": device}
        bnn, plain = fitted(job, few), network_of({**job, "method": "map"}, 784).to(device).eval()

        @torch.no_grad()
        def several(plain: nn.Module = plain) -> None:
            for _ in range(PASSES):
                plain(x)

        bl.predict(bnn, x)
        ratios = []
        for _ in range(11):
            one = seconds(several) / PASSES
            ratios.append(seconds(lambda bnn=bnn: bl.predict(bnn, x)) / one)
        found[method] = round(statistics.median(ratios), 2)
        print(f"{method}: a prediction takes {found[method]} passes", flush=True)
    return found


def summary(runs: list[Job]) -> dict[str, Any]:
    """Mean and standard deviation over seeds."""
    table: dict[str, Any] = {}
    for run in runs:
        rows = table.setdefault(run["data"], {}).setdefault(run["method"], {})
        same = ("data", "seed", "device")
        base = next((r for r in runs if r["method"] == "map" and all(r[k] == run[k] for k in same)), None)
        values = {k: v for k, v in run.items() if isinstance(v, float) and k != "train_seconds"}
        values |= {f"student {k}": v for k, v in run.get("student", {}).items()}
        if base is not None:
            values["train_cost"] = run["train_seconds"] / base["train_seconds"]
        for key, value in values.items():
            rows.setdefault(key, []).append(value)
    return {
        data: {
            method: {
                key: {"mean": float(f"{statistics.mean(v):.4g}"), "std": float(f"{statistics.pstdev(v):.2g}")}
                for key, v in rows.items()
            }
            for method, rows in methods.items()
        }
        for data, methods in table.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", nargs="+", default=["mnist", *REGRESSIONS])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    file = options.results / "many_models.json"
    done: list[Job] = json.loads(file.read_text())["runs"] if file.exists() else []

    def keep(**costs: Any) -> None:
        save("many_models", {"summary": summary(done), **costs, "runs": done}, folder=options.results)

    def each(result: Job) -> None:
        keep()
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}, flush=True)

    jobs = [
        {"data": data, "method": method, "seed": seed, "device": options.device}
        for seed in range(options.seeds)
        for data in options.data
        for method in options.methods
    ]
    finished(run, jobs, done, options.workers, each)
    keep(passes=passes(options.methods, options.device))
    for data, methods in summary(done).items():
        for method, row in methods.items():
            print(f"{data:9s}{method:16s}", *(f"{key} {value['mean']:g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
