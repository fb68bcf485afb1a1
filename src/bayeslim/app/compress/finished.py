"""Reading a finished run without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from torch import nn

from bayeslim.app.compress import records
from bayeslim.app.compress.folder import read_index
from bayeslim.app.compress.result import Compressed
from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError
from bayeslim.io.saving import load

NEEDED = ("fitted", "pruned", "slim", "benchmark.json", "measured.json")


def read_finished(folder: Path, architecture: nn.Module, test: str) -> Compressed:
    """Read the result of `compress` from the folder of a finished run.

    The architecture is a network of the class that was compressed. An unfinished run, or one that was measured on test
    data of another description, is an error.
    """
    _, done = read_index(folder)
    missing = [name for name in NEEDED if name not in done or not (folder / name).exists()]
    if missing:
        raise BayeslimError(
            f"The run in {folder} is not finished: it lacks {', '.join(missing)}. Run the `bayeslim compress` command "
            "that began it again."
        )
    measured = done["measured.json"]["settings"].get("test")
    if measured != test:
        raise BayeslimError(f"The run in {folder} was measured on other test data ({measured}). Got {test}.")
    bnn = cast("Bayesian", load(folder / "fitted", architecture))
    pruned = cast("Bayesian", load(folder / ("tuned" if "tuned" in done else "pruned"), architecture))
    slim = records.load_slim(folder / "slim", architecture)
    rows, timed = records.load_rows(folder / "measured.json"), records.load_benchmark(folder / "benchmark.json")
    files = tuple(folder / name for name in ("slim", "benchmark.json"))
    return Compressed(slim, pruned, bnn, pruned.plan_, rows, timed, files, folder)
