"""The demonstration: the whole job on the digits that ship with the package.

It trains LeNet-300-100, then cuts nine tenths of its weights in whole units, by its posterior and by magnitude, and
retrains nothing. The posterior of the slim network then says which digits it is certain of. With a recipe, the network
is trained to be sparse instead.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console

import bayeslim as bl
from bayeslim.app.cli.config import Settings
from bayeslim.app.cli.sources import data_by_name, device_by_name
from bayeslim.app.cli.tables import certainty_table, network_table
from bayeslim.app.report.quantities import duration
from bayeslim.app.report.scores import collected, predict_all

SETTINGS = {
    "model": "lenet_300_100(inputs=64)",
    "data": "digits",
    "epochs": 30,
    "sparsity": 0.9,
    "granularity": "unit",
    "steps": 6,
    "batch_size": 64,
    "validation": 0.2,
}


CUT = ("sparsity", "granularity", "steps")
"""Settings that a recipe has itself."""
TRAINING = {"epochs": 60, "lr": 5e-3}
"""Training of a recipe: the data set is small, so it needs more epochs and a higher rate."""
FOR_SMALL_DATA = {"l0": "l0(cost=30)"}
"""Recipes whose default price is for larger data sets."""


def run(output: Path, seed: int, recipe: str | None = None, device: str = "auto") -> None:
    """Compress, compare, and show the most and least certain digits."""
    console = Console()
    torch.set_num_threads(1)  # a second thread slows networks of this size down
    started = time.monotonic()
    chosen = dict(SETTINGS)
    if recipe is not None:
        recipe = FOR_SMALL_DATA.get(recipe, recipe)
        chosen = {k: v for k, v in SETTINGS.items() if k not in CUT} | {"recipe": recipe, **TRAINING}
    settings = Settings.read(None, {**chosen, "out": str(output), "seed": seed, "device": device})
    console.print(f"[bold]{bl.data.load(settings.data)}[/]", highlight=False)
    result = settings.run()
    settings.keep()
    loaders = data_by_name(settings.data, settings.batch_size, settings.validation, seed, device_by_name(device))
    batches = collected(loaders.test)
    prediction, targets = predict_all(result.pruned, batches), batches[0][1]
    order = prediction.entropy.argsort().tolist()
    console.print(certainty_table("The digits the slim network is most certain of", order[:5], prediction, targets))
    console.print(certainty_table("The least certain", order[::-1][:5], prediction, targets))
    how = "90 % of the weights cut, nothing retrained" if recipe is None else f"trained to be sparse ({recipe})"
    title = f"On 500 digits none of them has seen; {how}"
    console.print(network_table(result.rows, title))
    console.print(_in_runtimes(result.benchmark), highlight=False)
    for file in result.files:
        console.print(str(file), highlight=False)
    for note in result.notes:
        console.print(note, highlight=False)
    console.print(f"Done in {time.monotonic() - started:.0f} s.", highlight=False)


def _in_runtimes(found: bl.Benchmark) -> str:
    """Describe the latency of one input in every runtime."""
    batch = min(found.batch_sizes)
    pairs = [[found.latency(name, runtime, batch) for name in ("dense", "slim")] for runtime in found.runtimes]
    parts = [
        f"{runtime} {duration(dense)} → {duration(slim)}"
        for runtime, (dense, slim) in zip(found.runtimes, pairs, strict=True)
    ]
    return f"Latency of one input, dense → slim: {', '.join(parts)}."
