"""All methods on one backbone: cost, calibration, uncertainty and distillation.

    python benchmarks/many_models.py                                     on a CPU, some hours
    python benchmarks/many_models.py --device cuda --workers 10          on a GPU, some minutes
    python benchmarks/many_models.py --methods map swag --seeds 1        a part of it

MNIST, two hidden layers of 200 units: test error, negative log-likelihood, calibration error, and how well the
predictive entropy separates digits from KMNIST, notMNIST and Fashion-MNIST (AUROC). Two UCI sets, one hidden layer of
50 units: root mean squared error and negative log-likelihood in the targets' units, and calibration error; a seed is a
published split. Every posterior is then distilled into one plain network (`bl.distill`), on the training inputs and on
copies of them: images are shifted, other inputs get noise.

Costs are relative to one network trained as usual ("map"). That of training is measured on a tenth of the images, and
includes the trained network that a method starts from; on a CPU it counts the seconds of one core, so other work does
not matter. The cost of a prediction of the test inputs is in passes of the plain network, measured in turns, on the CPU
and on the GPU if there is one. Settings are the usual ones and were not tuned, except those of cyclical SGHMC: six
pairs of rate and temperature were tried on validation images, and its rate for regression was lowered after a run that
diverged. Snapshots, SWAG and SGHMC train for twice the epochs of the others. Finished runs are kept and not repeated.
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
PRIOR_STD = {"mnist": 0.3, "concrete": 1.0, "energy": 1.0}
MIN_PASSES_PER_TURN, MIN_INPUTS_PER_TURN = 8, 20_000
"""Passes of the plain network in a row while they are timed, and inputs in all of them."""
SHIFTS = ((0, 1), (1, 0), (0, -1), (-1, 0))
"""Shifts, in pixels, of the copies of training images that students learn from."""
JITTER_STD = 0.1
"""The standard deviation of the noise in copies of standardised inputs."""

Job = dict[str, Any]


def method_of(name: str, data: str) -> tuple[bl.Method, dict[str, Any]]:
    """Return a method and the options of its fit."""
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
        "variational": (
            bl.Variational(bl.families.DiagonalGaussian(initial_std=0.01), temperature=temperature, std_rate=1.0),
            cosine,
        ),
        "laplace": (bl.Laplace(), {"tune": "evidence"}),
    }  # fmt: skip
    return table[name]


METHODS = (
    "map", "mc dropout", "deep ensemble", "snapshot", "swag", "cyclical sghmc", "subnetwork sgld", "variational",
    "laplace",
)  # fmt: skip


def network_of(job: Job, inputs: int, outputs: int = 1) -> nn.Module:
    """Build the backbone, with dropout for MC dropout."""
    values = {"hidden": 50, "inputs": inputs, "classes": outputs, "depth": 1}
    shape = {"hidden": 200} if job["data"] == "mnist" else values
    return bl.zoo.create("mlp", dropout=0.2 if job["method"] == "mc dropout" else 0.0, **shape)


def load(job: Job) -> bl.data.Dataset:
    """Load the data of a run: regression has a split for every seed."""
    return bl.data.load("mnist") if job["data"] == "mnist" else bl.data.load(job["data"], split=job["seed"])


def fitted(job: Job, data: bl.data.Dataset) -> bl.Bayesian:
    """Fit the posterior of a run."""
    name, device = job["data"], job["device"]
    torch.manual_seed(job["seed"])
    likelihood = bl.likelihoods.Categorical() if name == "mnist" else bl.likelihoods.Gaussian("learned")
    network = network_of(job, data.train_x[0].numel()).to(device)
    prior = bl.priors.Normal(PRIOR_STD[name])
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
    """Load the training data in batches."""
    size = BATCH[job["data"]]
    return bl.data.Loader(data.train_x, data.train_y, batch_size=size, device=job["device"], seed=job["seed"])


def run(job: Job) -> Job:
    """Train, measure, distil, measure."""
    os.environ["BAYESLIM_PROGRESS"] = "0"
    warnings.simplefilter("ignore", BayeslimWarning)  # weights of pixels that are always zero have no effect
    torch.set_num_threads(1)
    data = load(job)
    bnn = fitted(job, data)
    result = {**job, **scores(bnn, data, job["seed"])}
    if job["method"] != "map":
        student = bl.distill(
            bnn,
            loader_of(job, data),
            network_of({**job, "method": "map"}, data.train_x[0].numel(), outputs=2).to(job["device"]),
            unlabelled=copies(data.train_x, job["seed"]).to(job["device"]),
            epochs=EPOCHS[job["data"]] // 2,
            lr=1e-3 if job["data"] == "mnist" else 3e-3,
            lr_schedule="cosine",
            seed=job["seed"],
            progress=False,
        )
        result["student"] = student_scores(student, data, job["device"])
    return result


def copies(x: Tensor, seed: int) -> Tensor:
    """Make four copies of every input: shifted images, or inputs with noise."""
    if x.ndim == 4:
        return torch.cat([torch.roll(x, shift, (2, 3)) for shift in SHIFTS])
    noise = torch.randn(len(SHIFTS) * len(x), x.shape[1], generator=torch.Generator().manual_seed(seed))
    return x.repeat(len(SHIFTS), 1) + JITTER_STD * noise


def scores(bnn: bl.Bayesian, data: bl.data.Dataset, seed: int) -> dict[str, float]:
    """Score the predictions of a posterior."""
    device = next(bnn.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)

    def predicted(x: Tensor) -> bl.Prediction:
        return bl.predict(bnn, x.to(device), batch_size=2_000, generator=generator)

    found = predicted(data.test_x)
    if data.num_classes is None:
        return regressed(found.mean.cpu(), found.variance.cpu(), data)
    outside = {other: predicted(bl.data.load(other, part="test").test_x).entropy.cpu() for other in OTHERS}
    assert found.probs is not None
    return classified(found.probs.cpu(), data.test_y, found.entropy.cpu(), outside)


def student_scores(student: nn.Module, data: bl.data.Dataset, device: str) -> dict[str, float]:
    """Score one plain network; for values it outputs mean and log variance."""
    if data.num_classes is None:
        with torch.no_grad():
            mean, log_variance = student(data.test_x.to(device)).cpu().chunk(2, -1)
        return regressed(mean, log_variance.exp(), data)

    @torch.no_grad()
    def predicted(x: Tensor) -> Tensor:
        return torch.cat([student(part.to(device)).softmax(-1) for part in x.split(2_000)]).cpu()

    def entropy(probs: Tensor) -> Tensor:
        return torch.special.entr(probs).sum(-1)

    probs = predicted(data.test_x)
    outside = {other: entropy(predicted(bl.data.load(other, part="test").test_x)) for other in OTHERS}
    return classified(probs, data.test_y, entropy(probs), outside)


def classified(probs: Tensor, y: Tensor, entropy: Tensor, outside: dict[str, Tensor]) -> dict[str, float]:
    """Compute error and calibration error in per cent, NLL, and AUROC."""
    measured = bl.metrics.Classification()
    measured.update(probs, y)
    values = measured.compute()
    row = {"error": 100 * values.error, "nll": values.nll, "ece": 100 * values.ece}
    return row | {name: 100 * bl.metrics.auroc(entropy, other) for name, other in outside.items()}


def regressed(mean: Tensor, variance: Tensor, data: bl.data.Dataset) -> dict[str, float]:
    """Compute RMSE and NLL in the targets' units, and the calibration error in %."""
    scale = float(data.target_scale.std)
    measured = bl.metrics.Regression()
    measured.update(mean * scale, variance * scale**2, data.test_y * scale)
    values = measured.compute()
    below = torch.special.ndtr((data.test_y - mean) / variance.sqrt())
    levels = torch.linspace(0.05, 0.95, 19)
    off = (below.flatten()[:, None] <= levels).double().mean(0) - levels
    return {"rmse": values.rmse, "nll": values.nll, "ece": 100 * float(off.abs().mean())}


def trainings(name: str, methods: Sequence[str], device: str) -> dict[str, float]:
    """Measure the cost of training relative to one network."""
    clock = time.process_time if device == "cpu" else time.monotonic
    data = load({"data": name, "seed": 0})
    part = slice(None, None, 10 if name == "mnist" else 1)
    fewer = replace(data, train_x=data.train_x[part], train_y=data.train_y[part])
    seconds = {}
    for method in dict.fromkeys(("map", *methods)):
        started = clock()
        fitted({"data": name, "method": method, "seed": 0, "device": device}, fewer)
        seconds[method] = clock() - started
        print(f"{name}, {method}: training takes {seconds[method]:.1f} s ({device})", flush=True)
    return {method: round(seconds[method] / seconds["map"], 2) for method in methods}


def passes(name: str, methods: Sequence[str], device: str) -> dict[str, float]:
    """Measure the cost of a prediction in passes of the plain network, in turns.

    The cost does not depend on the weights, so the networks are trained on a few examples only.
    """
    data = load({"data": name, "seed": 0})
    some = slice(2_560 if name == "mnist" else 2 * BATCH[name])
    few = replace(data, train_x=data.train_x[some], train_y=data.train_y[some])
    x = data.test_x.to(device)
    times = max(MIN_PASSES_PER_TURN, MIN_INPUTS_PER_TURN // len(x))

    def seconds(action: Callable[[], Any]) -> float:
        started = time.perf_counter()
        action()
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    found = {}
    for method in methods:
        job = {"data": name, "method": method, "seed": 0, "device": device}
        bnn, plain = fitted(job, few), network_of({**job, "method": "map"}, x[0].numel()).eval().to(device)

        @torch.no_grad()
        def several(plain: nn.Module = plain) -> None:
            for _ in range(times):
                plain(x)

        turns = max(1, times // len(bl.predict(bnn, x).samples))  # so that both take about as long

        def predictions(bnn: bl.Bayesian = bnn, turns: int = turns) -> None:
            for _ in range(turns):
                prediction = bl.predict(bnn, x)
                _ = prediction.mean, prediction.variance  # the variance is a property

        seconds(predictions)
        ratios = []
        for _ in range(11):
            one = seconds(several) / times
            ratios.append(seconds(predictions) / turns / one)
        found[method] = round(statistics.median(ratios), 2)
        print(f"{name}, {method}: a prediction takes {found[method]} passes ({device})", flush=True)
    return found


def summary(runs: list[Job]) -> dict[str, Any]:
    """Compute mean and standard deviation over seeds."""
    table: dict[str, Any] = {}
    for run in runs:
        rows = table.setdefault(run["data"], {}).setdefault(run["method"], {})
        values = {k: v for k, v in run.items() if isinstance(v, float) and not k.endswith("_seconds")}
        values |= {f"student {k}": v for k, v in run.get("student", {}).items()}
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
    devices = {"passes": "cpu"} | ({} if options.device == "cpu" else {"passes_on_gpu": options.device})
    os.environ["BAYESLIM_PROGRESS"] = "0"
    warnings.simplefilter("ignore", BayeslimWarning)
    torch.set_num_threads(1)
    costs = {key: {data: passes(data, options.methods, on) for data in options.data} for key, on in devices.items()}
    costs["training"] = {data: trainings(data, options.methods, options.device) for data in options.data}
    keep(**costs)
    for data, methods in summary(done).items():
        for method, row in methods.items():
            print(f"{data:9s}{method:16s}", *(f"{key} {value['mean']:g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
