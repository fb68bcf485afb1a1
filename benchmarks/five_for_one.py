"""Five sparse networks as one graph, against one dense network, one sparse network and five dense ones.

    python benchmarks/five_for_one.py --device cuda --workers 10 --minutes 4           LeNet-5 on MNIST, 3 x 5 members
    python benchmarks/five_for_one.py --network vgg --device cuda --minutes 9          VGG-like on CIFAR-10, repeat it

Every member is a run of the sparse recipe (`sparse_posteriors.py`, rule "weights") from its own dense network, and both
are saved. A repetition is five members with seeds of their own. Ensembles average probabilities. Measured on the test
images are error, negative log-likelihood and calibration error, how well the predictive entropy separates them from
other images (AUROC), the non-zero weights, and the bytes of one ONNX file (zeros stored sparsely) that holds the whole
ensemble. The file is compared with the networks before its size counts.

Members are kept as they finish; a call goes on where the last one stopped. A repetition is measured from its saved
networks when all of its members are there, and is not trained again after that.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from jobs import finished, result_of
from sparse_posteriors import CIFAR, DEFAULTS, SETTINGS, Run, errors, nonzeros, sparse_weights
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.errors import BayeslimError

MEMBERS = 5
OTHERS = ("kmnist", "notmnist", "fashion-mnist")
"""Other images. For CIFAR-10 they are padded to its size, grey, and joined by noise of its own colours."""

Job = dict[str, Any]


def member(job: Job) -> Job:
    """Train one dense network and its sparse descendant, and save both."""
    torch.set_num_threads(1)
    os.environ["BAYESLIM_PROGRESS"] = "0"
    started = time.monotonic()
    steps = Run({**DEFAULTS, **settings(job["network"]), "rule": "weights", **job})
    dense = steps.dense()
    found = sparse_weights(steps, dense)
    kept = {key: found[key] for key in ("weights", "left", "sparse")} | {"dense": errors(steps, dense)}
    bl.save(dense.cpu(), steps.folder("dense"))
    return {**job, **kept, "seconds": round(time.monotonic() - started, 1)}


def settings(network: str) -> Job:
    """Return the recipe's settings of a network."""
    return CIFAR if network == "vgg" else SETTINGS["weights"][network]


def networks(jobs: list[Job], cut: str) -> list[nn.Module]:
    """Load the saved networks of some members: "dense", or "" for the sparse ones."""
    found = []
    for job in jobs:
        folder = Run.folder(_Named({"rule": "weights", **job}), cut)
        network = bl.load(folder)
        assert isinstance(network, nn.Module)
        found.append(network.eval().to(job["device"]))
    return found


class _Named(Run):
    """A run that is only asked for the names of its folders."""

    def __init__(self, job: Job):
        self.job = job


@torch.no_grad()
def probabilities(members: list[nn.Module], images: Tensor) -> Tensor:
    """Average the class probabilities of the members."""
    device = next(members[0].parameters()).device
    parts = [torch.stack([m(x).softmax(1) for m in members]).mean(0).cpu() for x in images.to(device).split(500)]
    return torch.cat(parts)


def entropy(probs: Tensor) -> Tensor:
    """Compute the predictive entropy."""
    return torch.special.entr(probs).sum(1)


def row(members: list[nn.Module], test: tuple[Tensor, Tensor], others: dict[str, Tensor]) -> Job:
    """Measure an ensemble of one or more networks."""
    images, labels = test
    probs = probabilities(members, images)
    found: Job = {
        "error": 100 * float(bl.metrics.error(probs, labels)),
        "nll": float(bl.metrics.nll(probs, labels)),
        "ece": 100 * float(bl.metrics.expected_calibration_error(probs, labels)),
    }
    for name, x in others.items():
        found[f"auroc {name}"] = 100 * float(bl.metrics.auroc(entropy(probs), entropy(probabilities(members, x))))
    found["nonzeros"] = sum(sum(nonzeros(m).values()) for m in members)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ensemble.onnx"
        sparse = bool(found["nonzeros"] < 0.5 * sum(p.numel() for m in members for p in m.parameters() if p.ndim > 1))
        likelihood, there = bl.likelihoods.Categorical(), [copy.deepcopy(m).cpu() for m in members]
        found["bytes"] = bl.export(there, path, example=images[:2], likelihood=likelihood, sparse=sparse).bytes
    return found


def others_of(steps: Run) -> dict[str, Tensor]:
    """Load images of other kinds; those that are not there are left out."""
    found, like = {}, steps.test[0]
    for name in OTHERS:
        try:
            images = bl.data.load(name, part="test").test_x[: len(like)]
        except BayeslimError as error:
            print(f"Without {name}: {error}")
            continue
        by = (like.shape[-1] - images.shape[-1]) // 2
        found[name] = steps.scale(nn.functional.pad(images, [by] * 4).expand(-1, like.shape[1], -1, -1))
    if like.shape[1] > 1:
        mean, std = like.mean((0, 2, 3), keepdim=True), like.std((0, 2, 3), keepdim=True)
        found["noise"] = mean + std * torch.randn(like[:5000].shape, generator=torch.Generator().manual_seed(0))
    return found


def measured(repetition: int, jobs: list[Job]) -> list[Job]:
    """Measure a repetition: one dense, one sparse, five of each."""
    steps = Run({**DEFAULTS, **settings(jobs[0]["network"]), "rule": "weights", **jobs[0], "device": "cpu"})
    others = others_of(steps)
    dense, sparse = (networks(jobs, cut) for cut in ("dense", ""))
    ways = {"one dense": dense[:1], "one sparse": sparse[:1], "five dense": dense, "five sparse": sparse}
    rows = []
    for name, members in ways.items():
        rows.append({"row": name, "repetition": repetition} | row(members, steps.test, others))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def average(rows: list[Job], way: str, key: str) -> float:
    """Average a measurement of one row over the repetitions."""
    return statistics.mean(row[key] for row in rows if row["row"] == way)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=("lenet_300_100", "lenet5", "vgg"), default="lenet5")
    parser.add_argument("--members", type=int, default=MEMBERS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="of every training, for a quick look")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="start no member after this time")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "five_for_one", help="folder of the networks")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    quick = dict.fromkeys(("epochs", "dense_epochs", "tune_epochs"), options.epochs) if options.epochs else {}
    name = f"five_for_one_{options.network}"
    path = options.results / f"{name}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    rows, known = kept.get("rows", []), kept.get("members", [])
    there = {r["repetition"] for r in rows}
    left = [repetition for repetition in range(options.repetitions) if repetition not in there]
    jobs: list[Job] = [
        {"network": options.network, "seed": options.members * repetition + member, **quick}
        | {"device": options.device, "runs": str(options.runs)}
        for repetition in left
        for member in range(options.members)
    ]
    state = options.runs / f"{options.network}.json"
    done = json.loads(state.read_text()) if state.exists() else []

    def keep(result: Job) -> None:
        part = state.with_suffix(".part")
        part.write_text(json.dumps(done))
        part.replace(state)
        print(json.dumps(result), flush=True)

    found = finished(member, jobs, done, options.workers, keep, options.minutes)
    print(f"{len(found)} of {len(jobs)} members are trained.")
    for place, repetition in enumerate(left):
        own = jobs[place * options.members : (place + 1) * options.members]
        results = [result for job in own if (result := result_of(job, found)) is not None]
        if len(results) == len(own):
            rows += measured(repetition, own)
            known += [{key: value for key, value in result.items() if key != "runs"} for result in results]
            save(name, {"members": known, "rows": rows}, ["onnx", "onnxruntime"], folder=options.results)
    if not rows:
        return
    for way in dict.fromkeys(r["row"] for r in rows):
        own = [r for r in rows if r["row"] == way]
        numbers = {key: [r[key] for r in own] for key in own[0] if key not in ("row", "repetition")}
        print(f"{way:12s}", *(f"{key} {statistics.mean(values):.4g}" for key, values in numbers.items()))
    left = average(rows, "five sparse", "nonzeros") / average(rows, "one dense", "nonzeros")
    nll = average(rows, "five sparse", "nll") / average(rows, "five dense", "nll")
    print(f"Five sparse networks have {left:.4f} of the weights of one dense one, and {nll:.3f} of the NLL of five.")


if __name__ == "__main__":
    main()
