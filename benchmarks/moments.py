"""Cost of prediction by moments, and its distance to the average of 4,096 samples.

    python benchmarks/moments.py                     trains both networks on MNIST first, about half an hour on 2 cores
    python benchmarks/moments.py --keep networks/    keeps the trained networks, and does not train again

The cost is that of `bl.predict(bnn, x, how="moments")` on 10,000 inputs, its 256 draws of the outputs and all of its
uncertainties included, as a ratio to one pass of the plain network in evaluation mode on the same inputs. Both take
turns, and a turn that other processes disturbed is repeated. The distance is the total variation between predicted
class probabilities, averaged over test images; that of 32 samples is averaged over 16 such predictions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from contenders import PLAIN
from environment import RESULTS, save
from steps import NETWORKS, summary, take_turns

import bayeslim as bl

EPOCHS = {"mlp": 5, "lenet5": 3}
MAX_PLAIN_PASSES = {"mlp": 5.0, "lenet5": 2.5}
"""The goal: the cost of a prediction in passes of the plain network."""
REFERENCE_SAMPLES = 4_096
COMPARED_SAMPLES = 32
COMPARED_PREDICTIONS = 16

METHOD = bl.Variational(bl.families.DiagonalGaussian(initial_std=0.01), std_rate=1.0)


def trained(network: str, data: bl.data.Dataset, keep: Path | None) -> bl.Bayesian:
    """Train a network for a few epochs of Bayes by Backprop, or load it."""
    kept = None if keep is None else keep / network
    if kept is not None and kept.exists():
        return bl.load(kept, model=bl.zoo.create(network))
    torch.manual_seed(0)
    bnn = bl.bayesianize(
        bl.zoo.create(network), METHOD, likelihood=bl.likelihoods.Categorical(), prior=bl.priors.Normal(0.1)
    )
    bnn.fit(bl.data.Loader(data.train_x, data.train_y, batch_size=128, seed=0), epochs=EPOCHS[network], lr=1e-3, seed=0)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        bl.save(bnn, kept)
    return bnn


def distances(bnn: bl.Bayesian, x: torch.Tensor) -> dict[str, float]:
    """Compute the total variation of moments and of few samples to many samples."""
    torch.manual_seed(0)
    total = torch.zeros(len(x), 10, dtype=torch.float64)
    few = []
    for block in range(REFERENCE_SAMPLES // COMPARED_SAMPLES):
        probs = bl.predict(bnn, x, samples=COMPARED_SAMPLES, how="sample").probs
        total += probs
        few += [probs] if block < COMPARED_PREDICTIONS else []
    reference = total / (REFERENCE_SAMPLES // COMPARED_SAMPLES)

    def away(probs: torch.Tensor) -> float:
        return 0.5 * (probs - reference).abs().sum(-1).mean().item()

    return {
        "moments": away(bl.predict(bnn, x, how="moments").probs),
        f"{COMPARED_SAMPLES} samples": sum(map(away, few)) / len(few),
        "mean network": away(bl.predict(bnn, x, how="mean").probs),
        "inputs": len(x),
    }


def cost(bnn: bl.Bayesian, x: torch.Tensor, seconds: float, patience: float) -> dict[str, Any]:
    """Time the plain network and the prediction by moments in turns."""
    plain = bnn.mean_network().eval()

    def one_pass() -> None:
        with torch.no_grad():
            plain(x)

    actions = {PLAIN: one_pass, "moments": lambda: bl.predict(bnn, x, how="moments")}
    for action in actions.values():
        action()
    return summary(take_turns(actions, seconds, 1, patience))


def main() -> None:
    """Train, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="which networks")
    parser.add_argument("--images", type=int, default=500, help="test images for the distance")
    parser.add_argument("--inputs", type=int, default=10_000, help="how many inputs to time")
    parser.add_argument("--seconds", type=float, default=60, help="time for timing each network")
    parser.add_argument("--patience", type=float, default=300, help="more seconds, for what others disturbed")
    parser.add_argument("--keep", type=Path, help="a folder for the trained networks")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results file")
    options = parser.parse_args()
    data = bl.data.load("mnist")
    results = {}
    for network in options.networks:
        bnn = trained(network, data, options.keep)
        rows = cost(bnn, data.test_x[: options.inputs], options.seconds, options.patience)
        away = distances(bnn, data.test_x[: options.images])
        results[network] = {"cost": rows, "limit": MAX_PLAIN_PASSES[network], "total_variation": away}
        row = rows["moments"]
        print(
            f"{NETWORKS[network]}: moments cost {row['ratio']:.2f} plain passes ({row['ratio_low']:.2f} to "
            f"{row['ratio_high']:.2f}; limit {MAX_PLAIN_PASSES[network]}); distance to {REFERENCE_SAMPLES:,} samples "
            f"{away['moments']:.4f}, that of {COMPARED_SAMPLES} samples {away[f'{COMPARED_SAMPLES} samples']:.4f}, "
            f"of the mean network {away['mean network']:.4f}",
            flush=True,
        )
    print(f"Saved {save('moments', {'samples': 256, 'results': results}, folder=options.results)}")


if __name__ == "__main__":
    main()
