"""Perplexity of language models after one-shot pruning, without retraining.

    python benchmarks/language_models.py --device cuda --weights FOLDER     both models; FOLDER is of `llama.py prepare`
    python benchmarks/language_models.py --device cuda --models byte-gpt    6 blocks of 384, 60 MB of Python source
    python benchmarks/language_models.py --small                            2 blocks of 64: a check on a CPU

`smollm2` is SmolLM2-135M (`llama.py` says where weights and text come from; "dense" is the dequantised network): 128
calibration sequences of 512 tokens of Wikipedia, tested on other articles. `byte-gpt` is a byte-level GPT of 10.9 M
parameters (`byte_gpt.py`), trained once and kept in a file: 256 calibration sequences of 256 bytes of its training
files, tested on files that neither training nor calibration saw.

The linear layers of the blocks are cut by rules that all see the same calibration sequences: magnitude, Wanda,
SparseGPT and the exact row-wise solve as their papers describe them (`one_shot_baselines.py`); `bl.prune_blocks`, which
goes through the blocks once, with one solve a layer or several; and `bl.prune` with the Kronecker posterior of the
whole network, in one step and in four. Seeds are of the calibration sequences. `seconds` is the time of the whole cut,
the curvature included; the posterior of the dense network is measured once for all cuts of a seed, and its time is
counted in each. Every finished cell is written to the results at once and not computed again, so an interrupted run
resumes; `--minutes` limits the time of a run. Cells of another network than the present one are dropped.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama
import torch
from byte_gpt import MAX_BYTES, Shape, log_perplexity, python_source, sequences, trained
from environment import environment, provenance
from one_shot_baselines import BASELINES, Decoder, Target, prune_in_order
from torch import Tensor, nn

import bayeslim as bl

RESULTS = Path(__file__).parent / "results" / "language_models.json"
TARGETS = {
    "70 %": Target(0.7),
    "50 %": Target(0.5),
    "60 %": Target(0.6),
    "2:4": Target(0.5, 2, 4),
}
UNITS = {"units 20 %": 0.2, "units 30 %": 0.3}
OURS: dict[str, dict[str, Any]] = {
    "bayeslim x1": {"steps": 1},
    "bayeslim x4": {"steps": 4},
    "bayeslim x1 layer": {"steps": 1, "scope": "layer"},
    "bayeslim x4 layer": {"steps": 4, "scope": "layer"},
}
BLOCKS = {"blocks x1": 1, "blocks x4": 4, "blocks x16": 16}
"""Steps of `bl.prune_blocks`."""
STANDARD = [*BASELINES, "blocks x1", "blocks x16", "bayeslim x1", "bayeslim x4"]
SEEDS = (0, 1, 2)
TOKENS_PER_SEQUENCE = 512

Sequences = tuple[Tensor, Tensor]


@dataclass(eq=False)
class Subject:
    """A language model with its text.

    Attributes:
        name: of the model.
        network: the dense network.
        calibration: draws inputs and next tokens by a seed.
        test: inputs and next tokens.
        batch: sequences a batch.
        about: facts for the results.
    """

    name: str
    network: Decoder
    calibration: Callable[[int], Sequences]
    test: Sequences
    batch: int
    about: dict[str, Any]

    def loader(self, seed: int) -> list[Sequences]:
        """Draw calibration batches."""
        return list(zip(*(part.split(self.batch) for part in self.calibration(seed)), strict=True))


@dataclass(eq=False)
class DensePosterior:
    """The posterior of a dense network, kept for all cuts of a seed."""

    key: tuple[str, int] | None = None
    bnn: bl.Bayesian | None = None
    seconds: float = 0.0

    def of(self, subject: Subject, seed: int, std: float) -> bl.Bayesian:
        """Measure the posterior, unless it is at hand."""
        if self.bnn is None or self.key != (subject.name, seed):
            self.drop()
            started = time.perf_counter()
            self.bnn = posterior_of(subject.network, subject.loader(seed), std)
            wait(subject.network)
            self.key, self.seconds = (subject.name, seed), time.perf_counter() - started
        return self.bnn

    def drop(self) -> None:
        """Free its memory."""
        self.key, self.bnn, self.seconds = None, None, 0.0


@dataclass(eq=False)
class Cell:
    """One cut to make and to measure."""

    subject: str
    rule: str
    target: str
    seed: int
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = f"{self.rule} | {self.target} | seed {self.seed}"


def wait(network: nn.Module) -> None:
    """Wait for the device of a network."""
    if next(network.parameters()).is_cuda:
        torch.cuda.synchronize()


def posterior_of(network: Decoder, loader: list[Sequences], std: float) -> bl.Bayesian:
    """Measure the Kronecker posterior of the matrices that are cut."""
    bnn = bl.bayesianize(
        network,
        bl.Laplace(),
        likelihood=bl.likelihoods.Categorical(class_dim=-1),
        prior=bl.priors.Normal(std),
        sites=cut_weights(network),
    )
    bnn.fit(loader, progress=False)
    return bnn


def cut_weights(network: Decoder) -> str:
    """Write the names of the matrices that are cut as a pattern of sites."""
    return "|".join(f"{name}.weight".replace(".", r"\.") for name in network.matrices())


def kept(network: nn.Module) -> list[str]:
    """List the parameters outside of the blocks: without them the residual stream keeps its width."""
    return [name for name, _ in network.named_parameters() if not name.startswith("blocks.")]


def shape_of_cut(name: str) -> tuple[str, float]:
    """Find the granularity and the sparsity of a target."""
    if name in UNITS:
        return "unit", UNITS[name]
    target = TARGETS[name]
    return f"{target.n}:{target.m}" if target.m else "weight", target.sparsity


def cut_in_blocks(network: Decoder, loader: list[Sequences], name: str, steps: int) -> tuple[nn.Module, dict[str, Any]]:
    """Cut block after block, each fitted to the dense network."""
    granularity, sparsity = shape_of_cut(name)
    found = bl.prune_blocks(
        network,
        None if granularity == "2:4" else bl.Budget(sparsity=sparsity),
        loader,
        granularity=granularity,
        likelihood=bl.likelihoods.Categorical(class_dim=-1),
        steps=steps,
        progress=False,
    )
    return found.model, record(found.plan)


def record(plan: bl.Plan) -> dict[str, Any]:
    """Describe the solves of a cut."""
    solves = plan.solves.values()
    return {
        "iterations": max((solve.iterations for solve in solves), default=0),
        "residual": max((solve.residual for solve in solves), default=0.0),
        "rowwise": sum(solve.how == "row" for solve in solves),
        "sparsity": plan.sparsity,
    }


def cut_by_us(
    bnn: bl.Bayesian, loader: list[Sequences], name: str, steps: int, scope: str = "global"
) -> tuple[nn.Module, dict[str, Any]]:
    """Cut with the Kronecker posterior; return the network and a record of solves."""
    granularity, sparsity = shape_of_cut(name)
    pruned = bl.prune(
        bnn,
        bl.Budget(sparsity=sparsity, scope=scope, protect=kept(bnn.model) if name in UNITS else ()),
        granularity=granularity,
        steps=steps,
        refresh=loader if steps > 1 else None,
        example=loader[0][0][:2] if name in UNITS else None,
        progress=False,
    )
    assert pruned.plan_ is not None
    return pruned.mean_network(), record(pruned.plan_)


def cut_units_by_magnitude(network: Decoder, example: Tensor, sparsity: float) -> dict[str, Any]:
    """Set the heads and neurons of least norm to zero, in place."""
    bnn = bl.bayesianize(  # a posterior that needs no data: magnitude reads its mean alone
        network, bl.Variational(), likelihood=bl.likelihoods.Categorical(class_dim=-1), sites=cut_weights(network)
    )
    budget = bl.Budget(sparsity=sparsity, scope="layer", protect=kept(network))
    plan = bl.plan(bnn, budget, granularity="unit", criterion="magnitude", example=example)
    with torch.no_grad():
        for name, mask in plan.masks.items():
            p = network.get_parameter(name)
            p.mul_(mask.to(p.device))
    return {"sparsity": plan.sparsity}


def measured(cell: Cell, subject: Subject, dense: DensePosterior, std: float) -> dict[str, Any]:
    """Cut a copy of the network by one rule to one target, and measure it."""
    cuda = next(subject.network.parameters()).is_cuda
    loader = subject.loader(cell.seed)
    shared = 0.0
    if cell.rule in OURS:
        bnn = dense.of(subject, cell.seed, std)
        shared = dense.seconds
    else:
        dense.drop()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    wait(subject.network)
    started = time.perf_counter()
    facts: dict[str, Any] = {}
    cut: nn.Module
    if cell.rule in OURS:
        cut, facts = cut_by_us(bnn, loader, cell.target, **OURS[cell.rule])
    elif cell.rule in BLOCKS:
        cut, facts = cut_in_blocks(subject.network, loader, cell.target, BLOCKS[cell.rule])
    else:
        cut = copied = copy.deepcopy(subject.network)
        if cell.target in UNITS:
            facts = cut_units_by_magnitude(copied, loader[0][0][:2], UNITS[cell.target])
        else:
            tokens = subject.calibration(cell.seed)[0]
            prune_in_order(copied, tokens, BASELINES[cell.rule], TARGETS[cell.target], subject.batch)
    wait(subject.network)
    facts["seconds"] = round(time.perf_counter() - started + shared, 2)
    if cuda:
        facts["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    facts["log_perplexity"] = log_perplexity(cut, *subject.test, batch=subject.batch)
    return facts


def applies(rule: str, name: str) -> bool:
    """Tell whether a rule has a cell for a target."""
    if name in UNITS:
        return rule in ("magnitude", "blocks x1") or rule in OURS
    return not (TARGETS[name].m and rule.endswith("layer"))


def in_order(models: list[str], rules: list[str], targets: list[str], seeds: list[int]) -> Iterator[Cell]:
    """Yield all cells, the most telling first.

    The first seed of every model comes before the others. Within a seed SparseGPT comes first, then our cuts block by
    block, those in one step, which share the dense posterior, those in four steps, then the rest, then units.
    """
    ranked = ["sparsegpt", *BLOCKS, "bayeslim x1", "bayeslim x4"]
    ranked += [rule for rule in rules if rule not in ranked]
    for seed in seeds:
        for model in models:
            for wanted in ([n for n in targets if n not in UNITS], [n for n in targets if n in UNITS]):
                for rule in ranked:
                    yield from (
                        Cell(model, rule, name, seed) for name in wanted if rule in rules and applies(rule, name)
                    )


def byte_gpt(options: argparse.Namespace) -> Subject:
    """Load or train the byte-level GPT."""
    shape, max_bytes, calibration, test = Shape(), MAX_BYTES, 256, 512
    steps, batch, lr = options.train_steps, 64, 1e-3
    if options.small:
        shape, max_bytes, calibration, test = Shape(blocks=2, width=64, heads=4, context=64), 2_000_000, 64, 64
        steps, batch, lr = min(steps, 400), 16, 3e-3
    train_text, test_text = python_source(max_bytes)
    network = trained(options.checkpoint, shape, train_text, steps, batch, lr, options.device)
    return Subject(
        "byte-gpt",
        network,
        lambda seed: sequences(train_text, calibration, shape.context, seed),
        sequences(test_text, test, shape.context, seed=1234),
        32,
        {
            "network": "a byte-level GPT of 10.9 M parameters, trained on Python source",
            "calibration": [calibration, shape.context],
            "text_bytes": {"train": len(train_text), "test": len(test_text)},
        },
    )


def smollm2(options: argparse.Namespace) -> Subject:
    """Load SmolLM2, or its first blocks with --small, with its prose."""
    if options.weights is None:
        raise SystemExit("--weights must name the folder that `llama.py prepare` wrote. Got none.")
    network, prose = llama.load(options.weights).to(options.device), llama.tokens(options.weights)
    calibration, length, batch = 128, TOKENS_PER_SEQUENCE, 8
    test = len(prose["test"]) // length
    if options.small:
        network.blocks = network.blocks[:2]
        calibration, length, batch, test = 8, 64, 4, 8
    rows = prose["test"][: test * length].view(test, length)
    return Subject(
        "smollm2",
        network,
        lambda seed: sequences(prose["calibration"], calibration, length, seed),
        (rows[:, :-1].contiguous(), rows[:, 1:].contiguous()),
        batch,
        {
            "network": "SmolLM2-135M-Instruct, dequantised from 4 bits",
            "calibration": [calibration, length],
            "text_tokens": {name: len(t) for name, t in prose.items()},
        },
    )


MODELS = {"smollm2": smollm2, "byte-gpt": byte_gpt}


def fingerprint(network: nn.Module) -> str:
    """Hash the weights of a network, to tell whether results are its own."""
    sums = [float(p.detach().double().sum()) for p in network.parameters()]
    return hashlib.sha256(json.dumps([f"{value:.6e}" for value in sums]).encode()).hexdigest()[:16]


class Results:
    """The results file: facts and cells by model, written after every change."""

    def __init__(self, path: Path):
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.models: dict[str, Any] = self.content.setdefault("models", {})

    def begin(self, subject: Subject, options: argparse.Namespace) -> None:
        """Note a model's facts; drop cells of another network."""
        mark, told = fingerprint(subject.network), subject.about | {"std": options.std, "test": subject.test[0].numel()}
        known = self.models.get(subject.name, {})
        if known.get("fingerprint") != mark or any(known.get(key) != value for key, value in told.items()):
            dense = log_perplexity(subject.network, *subject.test, batch=subject.batch)
            if known:  # a note on the old cells goes with them
                self.content.pop("outdated", None)
            known = {"fingerprint": mark, **told, "dense_log_perplexity": dense, "cells": {}}
        self.models[subject.name] = known
        print(f"{subject.name}: dense perplexity {math.exp(known['dense_log_perplexity']):.4f}", flush=True)

    def cell(self, cell: Cell) -> dict[str, Any]:
        """Look a cell up; empty if it is not there."""
        found: dict[str, Any] = self.models.get(cell.subject, {}).get("cells", {}).get(cell.key, {})
        return found

    def expected_seconds(self, cell: Cell) -> float:
        """Return the time of the slowest finished cell of the same model and rule.

        Without one, a step of a cut in several steps counts as long as a cut in one.
        """
        cells = self.models.get(cell.subject, {}).get("cells", {})

        def slowest(rule: str) -> float:
            return max((c.get("seconds", 0.0) for key, c in cells.items() if key.startswith(f"{rule} |")), default=0.0)

        return slowest(cell.rule) or OURS.get(cell.rule, {}).get("steps", 1) * slowest("bayeslim x1")

    def put(self, cell: Cell, found: dict[str, Any]) -> None:
        """Add a cell and write the file."""
        self.models[cell.subject]["cells"][cell.key] = found
        facts = environment()
        self.content.pop("provenance", None)
        doubt = provenance(facts)
        marked = ({} if doubt is None else {"provenance": doubt}) | self.content | {"environment": facts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(marked, indent=1) + "\n")
        temporary.replace(self.path)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="2 blocks, little text, few steps")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--weights", type=Path, help="the folder of SmolLM2, as `llama.py prepare` writes it")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/byte_gpt.pt"), help="the trained byte-level GPT")
    parser.add_argument("--train-steps", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=9.0, help="no cell begins that would end after this time")
    parser.add_argument("--untimed", action="store_true", help="leave seconds out: other processes use the device")
    parser.add_argument("--std", type=float, default=1.0, help="of the prior")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS), help="calibration seeds")
    parser.add_argument("--rules", nargs="*", choices=[*BASELINES, *BLOCKS, *OURS], default=STANDARD)
    parser.add_argument("--targets", nargs="*", choices=[*TARGETS, *UNITS], default=[*TARGETS, *UNITS])
    return parser.parse_args()


def main() -> None:
    """Run the cells that are missing until the time is over."""
    options = parsed()
    started = time.monotonic()
    results = Results(options.results)
    subjects: dict[str, Subject] = {}
    dense = DensePosterior()
    for cell in in_order(options.models, options.rules, options.targets, options.seeds):
        if cell.subject not in subjects:
            subjects[cell.subject] = MODELS[cell.subject](options)
            results.begin(subjects[cell.subject], options)
        if "log_perplexity" in results.cell(cell):
            continue
        if time.monotonic() - started + results.expected_seconds(cell) > 60 * options.minutes:
            print(f"no time for {cell.subject} | {cell.key}; run again to go on", flush=True)
            continue
        try:
            found = measured(cell, subjects[cell.subject], dense, options.std)
            if options.untimed:
                found.pop("seconds")
        except Exception as error:  # a failed cell is a result of its rule, and must not end the others
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        results.put(cell, found)
        perplexity = math.exp(found["log_perplexity"]) if "log_perplexity" in found else math.nan
        print(f"{cell.subject} | {cell.key:<34} {perplexity:9.4f}   {found}", flush=True)
    print("Now run: python benchmarks/documents.py --write")


if __name__ == "__main__":
    main()
