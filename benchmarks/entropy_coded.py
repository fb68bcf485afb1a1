"""How few bytes a sparse network takes: bits from the posterior, entropy-coded into one file.

    python benchmarks/sparse_posteriors.py --device cuda --rules weights --networks lenet_300_100 lenet5
    python benchmarks/entropy_coded.py

Each sparse network of the first command, and the one beside it that was cut by magnitude to as many weights, gets the
diagonal Laplace posterior of the weights that are left, is rounded within it as coarsely as costs at most `SLACK`
points on the validation images, and is written with `bl.encode`. Bytes are those of the file on disk, all of it; the
test error is that of the network that `bl.decode` reads back.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from torch import nn

import bayeslim as bl

SLACK = 0.1
BITS = (6, 7, 8)
"""Widths of codes: the first with which a network stays within `SLACK`."""
NETWORKS = ("lenet_300_100", "lenet5")
CURVATURE = 10_000
"""Training images that the posterior is found from."""


def posterior(network: nn.Module, data: bl.data.Dataset) -> bl.Bayesian:
    """The Laplace posterior of the weights that are not zero."""
    likelihood, prior = bl.likelihoods.Categorical(), bl.priors.Normal(1.0)
    bnn = bl.bayesianize(
        network, bl.Laplace(structure="diag"), likelihood=likelihood, prior=prior, num_data=len(data.train_x)
    )
    bnn.masks = {name: p.detach() != 0 for name, p in network.named_parameters() if p.ndim > 1}
    bnn.fit(bl.data.Loader(data.train_x[:CURVATURE], data.train_y[:CURVATURE], 500), progress=False)
    return bnn


def measured(folder: Path, data: bl.data.Dataset, to: Path) -> dict[str, Any]:
    """Bytes and test errors of one network."""
    network = bl.load(folder).eval()
    bnn = posterior(network, data)
    validate = bl.data.Loader(data.valid_x, data.valid_y, 1000, shuffle=False)
    quantised, bits = rounded(bnn, validate)
    encoded = bl.encode(quantised, to, example=data.valid_x[:1])
    decoded = bl.decode(to)
    print(folder.name, encoded, flush=True)
    return {
        "network": folder.name,
        "bits": bits,
        "bytes": to.stat().st_size,
        "nonzeros": sum(int((p != 0).sum()) for p in decoded.parameters() if p.ndim > 1),
        "sparse": error(network, data),
        "decoded": error(decoded, data),
    }


def rounded(bnn: bl.Bayesian, validate: bl.data.Loader) -> tuple[bl.Quantised, int]:
    """As coarsely as the validation images allow, and the width of the codes."""
    for bits in BITS[:-1]:
        try:
            return bl.quantise(bnn, bits=bits, validate=validate, max_error_increase=SLACK), bits
        except ValueError as refused:
            print(refused, flush=True)
    return bl.quantise(bnn, bits=BITS[-1], validate=validate, max_error_increase=SLACK), BITS[-1]


@torch.no_grad()
def error(network: nn.Module, data: bl.data.Dataset) -> float:
    """On the test images, in per cent."""
    wrong = network.eval()(data.test_x).argmax(1) != data.test_y
    return round(100 * float(wrong.double().mean()), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--runs", type=Path, default=Path("runs/sparse_posteriors"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    data = bl.data.load("mnist").with_validation(5_000, seed=0)
    path = options.results / "entropy_coded.json"
    rows = json.loads(path.read_text())["runs"] if path.exists() else []
    for kind in (f"{name}{cut}" for name in options.networks for cut in ("", "-magnitude")):
        folders = sorted(options.runs.glob(f"{kind}-[0-9]"))
        for folder in folders:
            if folder.name not in [row["network"] for row in rows]:
                rows.append(measured(folder, data, options.runs / f"{folder.name}.bayes"))
                save(
                    "entropy_coded",
                    {"command": "python benchmarks/entropy_coded.py", "runs": rows},
                    folder=options.results,
                )
        names = [folder.name for folder in folders]
        if found := [row for row in rows if row["network"] in names]:
            means = {
                k: round(statistics.mean(row[k] for row in found), 2)
                for k in ("bytes", "nonzeros", "sparse", "decoded")
            }
            print(kind, json.dumps(means), flush=True)


if __name__ == "__main__":
    main()
