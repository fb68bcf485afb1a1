"""Bytes of sparse networks, quantised by the posterior and entropy-coded.

    python benchmarks/sparse_posteriors.py --device cuda --networks lenet_300_100 lenet5
    python benchmarks/entropy_coded.py

The networks are those of the first command that were cut by weights, and those cut by magnitude to as many weights.
Each gets the diagonal Laplace posterior of the weights that are left. It is quantised as coarsely as costs at most
`MAX_POINTS_LOST` on the validation images, with the number of bits that makes the smaller file, and written with
`bl.encode`. The size is that of the whole file on disk. The test error is that of the network that `bl.decode` reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from sparse_posteriors import split
from torch import nn

import bayeslim as bl

MAX_POINTS_LOST = {"": 0.1, "-augmented": 0.2, "-augmented-fresh": 0.2, "-augmented-unseen": 0.2, "-gentle-unseen": 0.1}
"""Percentage points of validation error that quantisation may cost, by the suffix of the network's folder."""
BITS, FALLBACK_BITS = (5, 6), (7, 8)
"""Bits of a code, and those tried if none of the first stays within `MAX_POINTS_LOST`."""
NETWORKS = ("lenet_300_100", "lenet5")
CURVATURE_IMAGES = 10_000
"""Training images that the curvature is measured on."""


def posterior(network: nn.Module, data: bl.data.Dataset) -> bl.Bayesian:
    """Fit the Laplace posterior of the weights that are not zero."""
    likelihood, prior = bl.likelihoods.Categorical(), bl.priors.Normal(1.0)
    bnn = bl.bayesianize(
        network, bl.Laplace(structure="diag"), likelihood=likelihood, prior=prior, num_data=len(data.train_x)
    )
    bnn.masks = {name: p.detach() != 0 for name, p in network.named_parameters() if p.ndim > 1}
    bnn.fit(bl.data.Loader(data.train_x[:CURVATURE_IMAGES], data.train_y[:CURVATURE_IMAGES], 500), progress=False)
    return bnn


def measured(folder: Path, data: bl.data.Dataset, to: Path, slack: float) -> dict[str, Any]:
    """Measure the bytes and the test errors of one network."""
    network = bl.load(folder).eval()
    bits = smallest(posterior(network, data), data, to, slack)
    decoded = bl.decode(to)
    return {
        "network": folder.name,
        "bits": bits,
        "slack": slack,
        "bytes": to.stat().st_size,
        "nonzeros": sum(int((p != 0).sum()) for p in decoded.parameters() if p.ndim > 1),
        "sparse": error(network, data),
        "decoded": error(decoded, data),
    }


def smallest(bnn: bl.Bayesian, data: bl.data.Dataset, to: Path, slack: float) -> int:
    """Write the smallest file within `slack` points; return the bits of its codes."""
    validate = bl.data.Loader(data.valid_x, data.valid_y, 1000, shuffle=False)
    best: tuple[int, int] | None = None
    for bits in (*BITS, *FALLBACK_BITS):
        if best is not None and bits in FALLBACK_BITS:
            break
        try:
            quantised = bl.quantise(bnn, bits=bits, validate=validate, max_error_increase=slack)
        except ValueError as refused:
            print(refused, flush=True)
            continue
        part = to.with_suffix(".part")
        encoded = bl.encode(quantised, part, example=data.valid_x[:1])
        print(to.name, f"{bits} bits", encoded, flush=True)
        if best is None or encoded.bytes < best[0]:
            best = encoded.bytes, bits
            part.replace(to)
    if best is None:
        raise ValueError(f"{to.name} cannot be rounded within {slack} points.")
    return best[1]


@torch.no_grad()
def error(network: nn.Module, data: bl.data.Dataset) -> float:
    """Compute the error on the test images in per cent."""
    wrong = network.eval()(data.test_x).argmax(1) != data.test_y
    return round(100 * float(wrong.double().mean()), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--runs", type=Path, default=Path("runs/sparse_posteriors"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    path = options.results / "entropy_coded.json"
    rows = json.loads(path.read_text())["runs"] if path.exists() else []
    for name, called, cut in itertools.product(options.networks, MAX_POINTS_LOST, ("", "-magnitude")):
        kind = f"{name}{called}{cut}"
        folders = sorted(options.runs.glob(f"{kind}-[0-9]"))
        data = split("mnist", next((which for which in ("fresh", "unseen") if which in called), "official"))
        for folder in folders:
            if folder.name not in [row["network"] for row in rows]:
                rows.append(measured(folder, data, options.runs / f"{folder.name}.bayes", MAX_POINTS_LOST[called]))
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
