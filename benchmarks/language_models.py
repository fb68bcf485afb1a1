"""Perplexity of a language model after one-shot pruning, without retraining.

    python benchmarks/language_models.py --device cuda              6 blocks of 384, about 60 MB of Python source
    python benchmarks/language_models.py --small                    2 blocks of 64: a check on a CPU, about a minute

A byte-level GPT (`byte_gpt.py`) is trained once and kept in a file. The linear layers of its blocks are then cut by
rules that all see the same calibration sequences: magnitude, Wanda, SparseGPT and the exact row-wise solve as their
papers describe them (`one_shot_baselines.py`), and bayeslim's Kronecker posterior in one step and in four. Perplexity
is measured on files that neither training nor calibration saw. Every finished cell is written to the results file at
once and not computed again, so an interrupted run resumes; `--minutes` limits the time of a run.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from byte_gpt import MAX_BYTES, ByteGPT, Shape, log_perplexity, python_source, sequences, trained
from environment import environment
from one_shot_baselines import BASELINES, Target, prune_in_order
from torch import Tensor

import bayeslim as bl

RESULTS = Path(__file__).parent / "results" / "language_models.json"
TARGETS = {
    "50 %": Target(0.5),
    "60 %": Target(0.6),
    "70 %": Target(0.7),
    "2:4": Target(0.5, 2, 4),
}
UNITS = {"units 20 %": 0.2, "units 30 %": 0.3}
OURS: dict[str, dict[str, Any]] = {
    "bayeslim x1": {"steps": 1},
    "bayeslim x4": {"steps": 4},
    "bayeslim x1 layer": {"steps": 1, "scope": "layer"},
    "bayeslim x4 layer": {"steps": 4, "scope": "layer"},
}


def posterior_of(network: ByteGPT, loader: list[tuple[Tensor, Tensor]], std: float) -> bl.Bayesian:
    """Measure the Kronecker posterior of the matrices that are cut."""
    names = "|".join(f"{name}.weight".replace(".", r"\.") for name in network.matrices())
    bnn = bl.bayesianize(
        network,
        bl.Laplace(),
        likelihood=bl.likelihoods.Categorical(class_dim=-1),
        prior=bl.priors.Normal(std),
        sites=names,
    )
    bnn.fit(loader, progress=False)
    return bnn


def cut_by_us(
    network: ByteGPT, loader: list[tuple[Tensor, Tensor]], target: Target, std: float, steps: int, scope: str = "global"
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Cut with the Kronecker posterior; return the network and a record of solves."""
    bnn = posterior_of(network, loader, std)
    if target.m:
        pruned = bl.prune(bnn, bl.plan(bnn, granularity=f"{target.n}:{target.m}"))
    else:
        budget = bl.Budget(sparsity=target.sparsity, scope=scope)
        pruned = bl.prune(bnn, budget, steps=steps, refresh=loader if steps > 1 else None, progress=False)
    solves = getattr(pruned.plan_, "solves", {}).values()
    facts = {
        "iterations": max((solve.iterations for solve in solves), default=0),
        "residual": max((solve.residual for solve in solves), default=0.0),
        "rowwise": sum(solve.how == "row" for solve in solves),
        "sparsity": pruned.plan_.sparsity,
    }
    return pruned.mean_network(), facts


def cut_units(
    network: ByteGPT, loader: list[tuple[Tensor, Tensor]], sparsity: float, std: float, criterion: str
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Cut heads and neurons; survivors move unless the criterion is magnitude."""
    bnn = posterior_of(network, loader, std)
    plan = bl.plan(
        bnn,
        bl.Budget(sparsity=sparsity),
        granularity="unit",
        criterion=criterion,
        example=loader[0][0][:2],
    )
    if criterion == "magnitude":
        cut = copy.deepcopy(network)
        with torch.no_grad():
            for name, mask in plan.masks.items():
                p = cut.get_parameter(name)
                p.mul_(mask.to(p.device))
        return cut, {"sparsity": plan.sparsity}
    return bl.prune(bnn, plan).mean_network(), {"sparsity": plan.sparsity}


def cell(
    network: ByteGPT,
    rule: str,
    name: str,
    calibration: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Cut a copy of the network by one rule to one target, and measure it."""
    cuda = options.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    copied = copy.deepcopy(network)
    loader = list(zip(*(part.split(options.batch) for part in calibration), strict=True))
    started = time.perf_counter()
    facts: dict[str, Any] = {}
    if name in UNITS:
        criterion = "magnitude" if rule == "magnitude" else "curvature"
        cut, facts = cut_units(copied, loader, UNITS[name], options.std, criterion)
    elif rule in BASELINES:
        prune_in_order(copied, calibration[0], BASELINES[rule], TARGETS[name], options.batch)
        cut = copied
    else:
        cut, facts = cut_by_us(copied, loader, TARGETS[name], options.std, **OURS[rule])
    if cuda:
        torch.cuda.synchronize()
        facts["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    facts["seconds"] = round(time.perf_counter() - started, 2)
    facts["log_perplexity"] = log_perplexity(cut, *test, batch=options.batch)
    return facts


def applies(rule: str, name: str) -> bool:
    """Tell whether a rule has a cell for a target."""
    if name in UNITS:
        return rule in ("magnitude", "bayeslim x1")
    return not (TARGETS[name].m and rule in OURS and rule != "bayeslim x1")


def table(results: dict[str, Any]) -> str:
    """Format perplexities, means over seeds, and the damage relative to SparseGPT's."""
    cells, dense = results["cells"], results["dense_log_perplexity"]
    rules = [*BASELINES, *OURS]
    names = [n for n in (*TARGETS, *UNITS) if any(key.split(" | ")[1] == n for key in cells)]
    lines = [f"dense perplexity {math.exp(dense):.3f}", f"{'':<20}" + "".join(f"{name:>20}" for name in names)]

    def damage(rule: str, name: str) -> float | None:
        found = [
            value["log_perplexity"] - dense
            for key, value in cells.items()
            if key.split(" | ")[:2] == [rule, name] and "log_perplexity" in value
        ]
        return sum(found) / len(found) if found else None

    for rule in rules:
        line = f"{rule:<20}"
        for name in names:
            own, reference = damage(rule, name), damage("sparsegpt", name)
            shown = "" if own is None else f"{math.exp(dense + own):.3f}"
            if own is not None and reference:
                shown += f" ({own / reference:.2f})"
            line += f"{shown:>20}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Run the cells that are missing until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="2 blocks of 64, little text, few steps")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/byte_gpt.pt"), help="the trained network")
    parser.add_argument("--minutes", type=float, default=7.5, help="no new cell begins after this time")
    parser.add_argument("--train-steps", type=int, default=5000)
    parser.add_argument("--train-batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--calibration", type=int, default=256, help="calibration sequences")
    parser.add_argument("--test", type=int, default=512, help="test sequences")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3, help="calibration seeds")
    parser.add_argument("--std", type=float, default=1.0, help="of the prior")
    parser.add_argument("--rules", nargs="*", default=[*BASELINES, *OURS])
    parser.add_argument("--targets", nargs="*", default=[*TARGETS, *UNITS])
    options = parser.parse_args()
    started = time.monotonic()
    shape, max_bytes = Shape(), MAX_BYTES
    if options.small:
        shape, max_bytes = Shape(blocks=2, width=64, heads=4, context=64), 2_000_000
        options.train_steps, options.train_batch, options.lr = min(options.train_steps, 400), 16, 3e-3
        options.calibration, options.test, options.seeds = 64, 64, 1
    train_text, test_text = python_source(max_bytes)
    network = trained(
        options.checkpoint,
        shape,
        train_text,
        options.train_steps,
        options.train_batch,
        options.lr,
        options.device,
    )
    test = sequences(test_text, options.test, shape.context, seed=1234)
    results: dict[str, Any] = {"cells": {}}
    if options.results.exists():
        results = json.loads(options.results.read_text())
    results["environment"] = environment()
    results["options"] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    results["text_bytes"] = {"train": len(train_text), "test": len(test_text)}
    results["dense_log_perplexity"] = log_perplexity(network, *test, batch=options.batch)
    print(f"dense perplexity {math.exp(results['dense_log_perplexity']):.4f}", flush=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        calibration = sequences(train_text, options.calibration, shape.context, seed=seed)
        for name in options.targets:
            for rule in options.rules:
                key = f"{rule} | {name} | seed {seed}"
                if not applies(rule, name) or "log_perplexity" in results["cells"].get(key, {}):
                    continue
                if time.monotonic() - started > 60 * options.minutes:
                    print("out of time; run again to go on", flush=True)
                    print(table(results))
                    return
                try:
                    found = cell(network, rule, name, calibration, test, options)
                except Exception as error:  # a failed cell is a result of its rule, and must not end the others
                    traceback.print_exc()
                    found = {"error": f"{type(error).__name__}: {error}"}
                results["cells"][key] = found
                perplexity = math.exp(found["log_perplexity"]) if "log_perplexity" in found else math.nan
                print(f"{key:<40} {perplexity:9.4f}   {found}", flush=True)
                temporary = options.results.with_suffix(".part")
                temporary.write_text(json.dumps(results, indent=1) + "\n")
                temporary.replace(options.results)
    print(table(results))


if __name__ == "__main__":
    main()
