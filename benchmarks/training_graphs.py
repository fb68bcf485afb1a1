"""Training on a GPU: eager steps, steps replayed as one CUDA graph, and compiled ones.

    python benchmarks/training_graphs.py steps        a step, as a ratio to the plain network's eager step
    python benchmarks/training_graphs.py fits         whole trainings on MNIST: time and test error

Steps take turns in one process: every round times each of them, and a ratio is taken within its round. The plain
network's step is the usual loop with a fused Adam. Fits are `bnn.fit(loader)` from data on the GPU, including
capture and compilation: Bayes by Backprop with 400 units for 600 epochs, with the setting that `bayes_by_backprop.py`
chose for Blundell's KL weights, and Sparse Variational Dropout of LeNet-5 for 100.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import RESULTS, save
from torch import nn

import bayeslim as bl
from bayeslim.train.captured_step import step_of
from bayeslim.train.step import Step

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "784-400-400-10, batch 128": (lambda: bl.zoo.create("mlp"), (1, 28, 28), 128),
    "LeNet-5, batch 1024": (lambda: bl.zoo.create("lenet5"), (1, 28, 28), 1024),
    "ResNet-18, batch 512": (lambda: bl.zoo.create("resnet18"), (3, 32, 32), 512),
}
WAYS: dict[str, bool | str] = {"eager": False, "captured": "auto", "compiled and captured": True}
ESTIMATORS = ("shared", "local")


def plain_step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    """Make the eager step of the plain network."""
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model.train()

    def step() -> None:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_step(model: nn.Module, batch: Any, estimator: Any, way: bool | str) -> Callable[[], None]:
    """Make the step of `fit`."""
    bnn = bl.bayesianize(
        model, bl.Variational(estimator=estimator), likelihood=bl.likelihoods.Categorical(), num_data=60_000
    )
    bnn.train()
    eager = Step(bnn, bnn.objective, bnn.optimizer(1e-4), batch[0].device, None, None, False, way is True)
    made = step_of(eager, way, 1)  # type: ignore[arg-type]
    return lambda: made(batch, 1, True)


def seconds(step: Callable[[], None], calls: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / calls


def steps(rounds: int, only: str, folder: Path) -> dict[str, Any]:
    """Time a step of every case, estimator and way, and save after each case."""
    path = folder / "training_steps.json"
    table: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    for case, (make, shape, size) in CASES.items():
        if only not in case:
            continue
        torch.manual_seed(0)
        model = make().cuda()
        batch = torch.rand(size, *shape, device="cuda"), torch.randint(10, (size,), device="cuda")
        contenders = {"plain": plain_step(make().cuda(), batch)}
        for estimator in ESTIMATORS:
            for name, way in WAYS.items():
                contenders[f"{estimator}, {name}"] = our_step(model, batch, estimator, way)
        failed = {}
        for name, step in list(contenders.items()):
            started = time.perf_counter()
            try:
                for _ in range(10):
                    step()
            except Exception as error:
                failed[name] = str(error).partition("\n")[0]
                del contenders[name]
            print(f"{case}: {name} ready after {time.perf_counter() - started:.1f} s", flush=True)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, step in contenders.items():
                times[name].append(seconds(step, 20))
        table[case] = {
            name: {
                "milliseconds": 1000 * statistics.median(own),
                "ratio": statistics.median(a / b for a, b in zip(own, times["plain"], strict=True)),
            }
            for name, own in times.items()
        } | {name: {"failed": reason} for name, reason in failed.items()}
        for name, row in table[case].items():
            print(f"  {name:32} {row}", flush=True)
        save("training_steps", {"results": table}, folder=folder)
    return table


def fits(epochs: float, only: str, folder: Path) -> dict[str, Any]:
    """Train to the end, measure on the test images, and save after each training."""
    data = bl.data.load("mnist")
    path = folder / "training_fits.json"
    table: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    jobs: dict[str, Any] = {
        "Bayes by Backprop, 400 units, 600 epochs": (
            "mlp",
            bl.Variational(
                bl.families.DiagonalGaussian(initial_std=0.01),
                estimator="shared", kl_schedule=bl.schedules.Blundell(), std_rate=1.0,
            ),
            bl.priors.Normal(0.2), 600, 128, {"lr": 1e-3, "lr_schedule": "cosine", "compile": True},
        ),
        "Sparse VD, LeNet-5, 100 epochs": (
            "lenet5", bl.Variational(bl.families.SparseGaussian(), kl_schedule=bl.schedules.Warmup(20)),
            bl.priors.LogUniform(), 100, 250, {"lr": 1e-3, "lr_schedule": "linear"},
        ),
    }  # fmt: skip
    for name, (network, method, prior, whole, size, options) in jobs.items():
        if only not in name:
            continue
        torch.manual_seed(0)
        loader = bl.data.Loader(data.train_x, data.train_y, batch_size=size, device="cuda")
        bnn = bl.bayesianize(bl.zoo.create(network), method, likelihood=bl.likelihoods.Categorical(), prior=prior)
        started = time.perf_counter()
        bnn.fit(loader, epochs=max(1, round(whole * epochs)), device="cuda", seed=0, progress=False, **options)
        torch.cuda.synchronize()
        spent = time.perf_counter() - started
        probs = bl.predict(bnn.eval(), data.test_x.cuda()).probs.cpu()
        error = float(bl.metrics.error(probs, data.test_y))
        table[name] = {"seconds": spent, "error": error, "share_of_epochs": epochs}
        print(name, table[name], flush=True)
        save("training_fits", {"results": table}, folder=folder)
    return table


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["steps", "fits"])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of 20 steps")
    parser.add_argument("--epochs", type=float, default=1.0, help="the share of the epochs to train, for a trial")
    parser.add_argument("--only", default="", help="cases or trainings whose name contains this")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results file")
    options = parser.parse_args()
    if options.what == "steps":
        steps(options.rounds, options.only, options.results)
    else:
        fits(options.epochs, options.only, options.results)


if __name__ == "__main__":
    main()
