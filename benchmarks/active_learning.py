"""Learning curves of active learning on MNIST: batch BALD, BALD, entropy and random, five seeds.

    python benchmarks/active_learning.py                       20 first labels, 28 rounds of 10
    python benchmarks/active_learning.py --device cuda --workers 5
    python benchmarks/active_learning.py --data digits --rounds 5 --seeds 1

A network of two hidden layers of 128 units with dropout (`bl.MCDropout`) is trained from new random weights in every
round. Inputs are chosen from a random part of the rest, as in Kirsch et al. 2019 (arXiv:1906.08158). Two labels of each
class come first. The curve is the test error of averaged predictions against the number of labels.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from environment import RESULTS, save
from jobs import Job, finished
from torch import Tensor

import bayeslim as bl

RULES = ("random", "entropy", "bald", "batch-bald")
POOL, SAMPLES, EPOCH_STEPS = 5000, 50, 400


def work(job: Job) -> Job:
    """Run one curve."""
    torch.set_num_threads(1)
    data, device, seed = bl.data.load(job["data"]), job["device"], job["seed"]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.train_x), generator=generator)[:POOL]
    x, y = data.train_x[order].to(device), data.train_y[order].to(device)
    first = torch.cat([(y == c).nonzero().flatten()[:2].cpu() for c in range(10)])

    def fit(labelled: Tensor) -> bl.Bayesian:
        torch.manual_seed(seed)
        model = bl.zoo.mlp(128, x[0].numel(), dropout=0.3).to(device)
        bnn = bl.bayesianize(
            model, bl.MCDropout(), likelihood=bl.likelihoods.Categorical(), prior=bl.priors.Normal(1.0)
        )
        own = labelled.to(device)
        loader = bl.data.Loader(x[own], y[own], batch_size=64, seed=seed)
        bnn.fit(loader, epochs=max(1, EPOCH_STEPS // len(loader)), lr=2e-3, seed=seed, progress=False)
        return bnn.eval()

    rounds = bl.learn_actively(
        fit, x, first, job["count"], job["rounds"], job["rule"], generator=generator, samples=SAMPLES
    )
    curve = []
    for one in rounds:
        scores = bl.metrics.Classification()
        for part, labels in zip(data.test_x.split(1000), data.test_y.split(1000), strict=True):
            scores.update(bl.predict(one.bnn, part.to(device), SAMPLES).probs.cpu(), labels)
        found = scores.compute()
        curve.append({"labels": len(one.labelled), "error": found.error, "nll": found.nll})
    return job | {"curve": curve}


def show(runs: list[Job]) -> None:
    for rule in RULES:
        own = [run["curve"] for run in runs if run["rule"] == rule]
        if own:
            points = [
                f"{points[0]['labels']}: {100 * statistics.fmean(p['error'] for p in points):.1f}"
                for points in zip(*own, strict=True)
            ]
            print(f"{rule:11} test error % by labels, {len(own)} seeds   {'  '.join(points[::3])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--count", type=int, default=10, help="labels a round")
    parser.add_argument("--rounds", type=int, default=28)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    path = options.results / "active_learning.json"
    done: list[Job] = json.loads(path.read_text())["runs"] if path.exists() else []
    settings = {name: getattr(options, name) for name in ("data", "count", "rounds", "device")}
    jobs = [{"rule": rule, "seed": seed, **settings} for seed in range(options.seeds) for rule in options.rules]

    def each(result: Job) -> None:
        save("active_learning", {"runs": done}, folder=options.results)
        print(result["rule"], result["seed"], f"{100 * result['curve'][-1]['error']:.1f} %", flush=True)

    show(finished(work, jobs, done, options.workers, each))


if __name__ == "__main__":
    main()
