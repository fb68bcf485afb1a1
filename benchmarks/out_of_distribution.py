"""Calibration and out-of-distribution detection of Laplace posteriors on MNIST.

    python benchmarks/out_of_distribution.py --seeds 3

A LeNet-300-100 is trained on MNIST as usual. Every posterior is fitted around the same weights, and its prior precision
chosen on 2,000 held-out training images. Measured are error, negative log-likelihood and calibration error on the test
digits, and how well the predictive entropy separates them from other images (AUROC). Probabilities are averages over
256 draws of the linearised outputs; "probit" is a closed form instead, for the Kronecker posterior; "sample" averages
32 networks drawn from it instead of linearising, to show why that is not the default; "map" is the plain network.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from environment import save
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.errors import BayeslimError, BayeslimWarning

OTHERS = ("kmnist", "notmnist", "fashion-mnist")
METHODS: dict[str, bl.Laplace] = {
    "last layer": bl.Laplace("full", "last-layer"),
    "diagonal": bl.Laplace("diag"),
    "kronecker": bl.Laplace("kron"),
    "subnetwork": bl.Laplace(subset=bl.Subnetwork(1_000)),
}


def trained(data: bl.data.Dataset, epochs: int, seed: int) -> nn.Module:
    """Train the network with Adam, the learning rate decaying to zero."""
    torch.manual_seed(seed)
    network = bl.zoo.create("lenet_300_100")
    loader = bl.data.Loader(data.train_x, data.train_y, batch_size=128, seed=seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * len(loader))
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def scores(found: bl.Prediction, y: Tensor, outside: dict[str, bl.Prediction]) -> dict[str, float]:
    measured = bl.metrics.Classification()
    assert found.probs is not None
    measured.update(found.probs, y)
    result = measured.compute()
    row = {"error": 100 * result.error, "nll": result.nll, "ece": 100 * result.ece}
    return row | {name: 100 * bl.metrics.auroc(found.entropy, p.entropy) for name, p in outside.items()}


def run(data: bl.data.Dataset, others: dict[str, Tensor], epochs: int, seed: int) -> dict[str, dict[str, float]]:
    network = trained(data, epochs, seed)
    loader = bl.data.Loader(data.train_x, data.train_y, batch_size=1000, shuffle=False)
    validate = bl.data.Loader(data.valid_x, data.valid_y, batch_size=1000, shuffle=False)
    rows = {}
    for name, method in METHODS.items():
        started = time.perf_counter()
        bnn = bl.bayesianize(network, method, likelihood=bl.likelihoods.Categorical())
        bnn.fit(loader, tune="grid", validate=validate, seed=seed, progress=False)
        ways = {name: ("joint", 256)}
        if name == "kronecker":
            ways |= {"probit": ("probit", 32), "sample": ("sample", 32), "map": ("mean", 1)}
        for row, (how, draws) in ways.items():
            generator = torch.Generator().manual_seed(seed)
            outside = {other: bl.predict(bnn, x, draws, how, generator=generator) for other, x in others.items()}
            rows[row] = scores(bl.predict(bnn, data.test_x, draws, how, generator=generator), data.test_y, outside)
        print(f"seed {seed}, {name}: {time.perf_counter() - started:.0f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", BayeslimWarning)  # weights of pixels that are always zero have no effect
    data = bl.data.load("mnist").with_validation(2_000, seed=0)
    others = {}
    for name in OTHERS:
        try:
            others[name] = bl.data.load(name, part="test").test_x
        except BayeslimError as error:
            print(f"Without {name}: {error}")
    runs = [run(data, others, arguments.epochs, seed) for seed in range(arguments.seeds)]
    table: dict[str, Any] = {}
    for row in ("map", *METHODS, "probit", "sample"):
        table[row] = {
            key: {"mean": statistics.mean(values), "std": statistics.pstdev(values)}
            for key in runs[0][row]
            if (values := [each[row][key] for each in runs])
        }
        print(f"{row:12s}", *(f"{key} {v['mean']:.3f} ± {v['std']:.3f}" for key, v in table[row].items()))
    print(save("out_of_distribution", {"epochs": arguments.epochs, "seeds": arguments.seeds, "table": table}))


if __name__ == "__main__":
    main()
