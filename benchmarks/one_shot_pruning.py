"""One-shot pruning of LeNet-300-100 and LeNet-5 on MNIST, without retraining.

    python benchmarks/one_shot_pruning.py --device cuda

Every rule cuts the same trained networks to the same sparsities, three seeds each:

    magnitude       smallest |w| first, survivors stay
    diagonal        smallest |μ|/σ under the diagonal Laplace posterior first, survivors stay
    snr             smallest |μ|/σ under the Kronecker posterior's marginals first, survivors stay
    row x1, x10     Kronecker posterior; survivors move, each output's row by itself; in one step, or in ten with the
                    curvature measured again after each
    joint x1, x10   the same with all survivors of a layer moving together: the conditional mean

Finished runs are kept in the results file and not repeated, so an interrupted benchmark resumes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import RESULTS, save
from torch import Tensor, nn

import bayeslim as bl

NETWORKS = {"lenet_300_100": {"epochs": 30}, "lenet5": {"epochs": 20}}
SPARSITIES = (0.9, 0.95, 0.98)
RULES: dict[str, dict[str, Any]] = {
    "magnitude": {"structure": "diag", "criterion": "magnitude"},
    "diagonal": {"structure": "diag", "criterion": "snr"},
    "snr": {"structure": "kron", "criterion": "snr", "survivors": "stay"},
    "row x1": {"structure": "kron", "how": "row", "steps": 1},
    "row x10": {"structure": "kron", "how": "row", "steps": 10},
    "joint x1": {"structure": "kron", "how": "joint", "steps": 1},
    "joint x10": {"structure": "kron", "how": "joint", "steps": 10},
}


def trained(name: str, epochs: int, seed: int, loader: Any, device: str) -> nn.Module:
    """Train the dense network with Adam, the learning rate decaying to zero."""
    torch.manual_seed(seed)
    network = bl.zoo.create(name).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, weight_decay=1e-5, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


@torch.no_grad()
def error(network: nn.Module, x: Tensor, y: Tensor) -> float:
    """Compute the test error in per cent."""
    wrong = sum(int((network(a).argmax(-1) != b).sum()) for a, b in zip(x.split(2000), y.split(2000), strict=True))
    return 100 * wrong / len(y)


def pruned_error(network: nn.Module, rule: dict[str, Any], sparsity: float, loader: Any, test: Any) -> float:
    """Compute the test error after one rule's cut."""
    bnn = bl.bayesianize(network, bl.Laplace(structure=rule["structure"]), likelihood=bl.likelihoods.Categorical())
    bnn.fit(loader, progress=False)
    steps = rule.get("steps", 1)
    budget = bl.Budget(sparsity=sparsity, empty_layers="keep best")
    if rule.get("survivors") == "stay":
        masks = bl.plan(bnn, budget, criterion=rule["criterion"]).masks
        masked = copy.deepcopy(network)
        with torch.no_grad():
            for name, mask in masks.items():
                masked.get_parameter(name).mul_(mask.to(masked.get_parameter(name).device))
        return error(masked, *test)
    pruned = bl.prune(
        bnn,
        budget,
        criterion=rule.get("criterion", "auto"),
        how=rule.get("how", "joint"),
        steps=steps,
        refresh=loader if steps > 1 else None,
    )
    return error(pruned.mean_network().eval(), *test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--sparsities", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ.setdefault("BAYESLIM_PROGRESS", "0")
    data = bl.data.load("mnist")
    test = (data.test_x.to(options.device), data.test_y.to(options.device))
    path = options.results / "one_shot_pruning.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []

    def keep() -> None:
        command = f"python benchmarks/one_shot_pruning.py --device {options.device}"
        save("one_shot_pruning", {"command": command, "summary": summary(runs), "runs": runs}, folder=options.results)

    for name in options.networks:
        for seed in range(options.seeds):
            loader = bl.data.Loader(data.train_x, data.train_y, batch_size=128, device=options.device, seed=seed)
            large = bl.data.Loader(data.train_x, data.train_y, batch_size=1000, shuffle=False, device=options.device)
            wanted = [("dense", 0.0), *((rule, s) for rule in options.rules for s in options.sparsities)]
            key = {"network": name, "seed": seed}
            done = {(r["rule"], r["sparsity"]) for r in runs if all(r[k] == v for k, v in key.items())}
            if all(w in done for w in wanted):
                continue
            network = trained(name, NETWORKS[name]["epochs"], seed, loader, options.device)
            for rule, sparsity in wanted:
                if (rule, sparsity) in done:
                    continue
                started = time.monotonic()
                if rule == "dense":
                    value = error(network, *test)
                else:
                    value = pruned_error(network, RULES[rule], sparsity, large, test)
                seconds = round(time.monotonic() - started, 2)
                runs.append({**key, "rule": rule, "sparsity": sparsity, "test_error": value, "seconds": seconds})
                keep()
                print(f"{name} seed {seed} {rule} {100 * sparsity:g} %: {value:.2f} % ({seconds} s)", flush=True)
    keep()
    print(json.dumps(summary(runs), indent=1))


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Average the test error over seeds by network, rule and sparsity."""
    found: dict[str, Any] = {}
    for run in runs:
        rules = found.setdefault(run["network"], {}).setdefault(run["rule"], {})
        rules.setdefault(f"{run['sparsity']:g}", []).append(run["test_error"])
    return {
        network: {
            rule: {s: {"mean": round(statistics.mean(v), 3), "seeds": len(v)} for s, v in by_sparsity.items()}
            for rule, by_sparsity in rules.items()
        }
        for network, rules in found.items()
    }


if __name__ == "__main__":
    main()
