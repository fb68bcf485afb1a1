"""`benchmark`: a dense network against its slim form, on disk, in memory and in time, in every runtime there is.

All contenders take turns: in every round each network runs in each runtime once, so that other load on the machine
affects all of them alike. A speed-up is the median over rounds of the ratio of two times of the *same* round, with the
quartiles of those ratios as its spread.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.compact import cost
from bayeslim.compact.example import batches, run_example
from bayeslim.compact.quiet import quiet
from bayeslim.compact.trace import evaluating_copy
from bayeslim.export.memory import peak_bytes
from bayeslim.export.runtimes import RUNTIMES, Contender, Preparation, available
from bayeslim.io.files import write_file
from bayeslim.io.saving import save
from bayeslim.train.progress import progress
from bayeslim.types import Inputs, to_device, with_batch_size

_NETWORKS = ("dense", "slim")
_MIN_SECONDS_PER_TIMING = 2e-3
"""A timing repeats the call until it has lasted this long."""


@dataclass(frozen=True)
class Size:
    """The size of a network.

    Attributes:
        parameters: their number.
        nonzeros: the number of those that are not zero.
        flops: additions and multiplications of matrix products and convolutions for one example.
        folder_bytes: the folder that `bayeslim.save` writes, zeros stored sparsely.
        peak_bytes: weights, and the most that the tensors of a call with the largest batch take at once.
        file_bytes: the files of other runtimes, by their names.
    """

    parameters: int
    nonzeros: int
    flops: int
    folder_bytes: int
    peak_bytes: int
    file_bytes: dict[str, int]


@dataclass(frozen=True)
class Ratio:
    """A speed-up: the median over rounds, with its quartiles."""

    median: float
    low: float
    high: float

    def __repr__(self) -> str:
        return f"{self.median:.3g}x ({self.low:.3g}-{self.high:.3g})"


@dataclass(frozen=True, repr=False)
class Benchmark:
    """A dense network against a slim one.

    Attributes:
        sizes: of "dense" and "slim".
        seconds: a call's time in every round, by network, runtime and batch size.
        environment: the machine and the versions.
        skipped: runtimes that do not take one of the networks, and why.
    """

    sizes: dict[str, Size]
    seconds: dict[tuple[str, str, int], tuple[float, ...]]
    environment: dict[str, Any]
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def runtimes(self) -> tuple[str, ...]:
        """The runtimes that were measured."""
        return tuple(dict.fromkeys(runtime for _, runtime, _ in self.seconds))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes that were measured."""
        return tuple(dict.fromkeys(size for _, _, size in self.seconds))

    def latency(self, network: str, runtime: str, batch_size: int) -> float:
        """Return the median time of a call, in seconds."""
        return statistics.median(self._rounds(network, runtime, batch_size))

    def speedup(self, runtime: str, batch_size: int, *, against: str | None = None) -> Ratio:
        """Return how many times faster the slim network is than the dense one.

        Args:
            runtime: where the slim one runs.
            batch_size: one of those measured.
            against: where the dense one runs; in the same runtime if not given.
        """
        dense, slim = self._rounds("dense", against or runtime, batch_size), self._rounds("slim", runtime, batch_size)
        ratios = [a / b for a, b in zip(dense, slim, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return Ratio(median, low, high)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write the benchmark as JSON; also to a file, if a path is given."""
        timings = [
            {"network": network, "runtime": runtime, "batch_size": size, "seconds": list(values)}
            for (network, runtime, size), values in self.seconds.items()
        ]
        speedups = [
            {
                "runtime": runtime,
                "batch_size": size,
                "same_runtime": asdict(self.speedup(runtime, size)),
                "dense_eager": asdict(self.speedup(runtime, size, against="eager")),
            }
            for runtime in self.runtimes
            for size in self.batch_sizes
        ]
        content = {
            "environment": self.environment,
            "sizes": {name: asdict(size) for name, size in self.sizes.items()},
            "speedups": speedups,
            "skipped": self.skipped,
            "timings": timings,
        }
        text = json.dumps(content, indent=1)
        if path is not None:
            write_file(Path(path), text.encode())
        return text

    def __repr__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "dense", "slim", "ratio", "to dense eager")]
        for label, dense, slim, unit, scale in self._size_rows():
            values = (f"{_shown(value / scale)}{unit}" for value in (dense, slim))
            rows.append((label, *values, f"{dense / max(slim, 1):.3g}x", ""))
        for size in self.batch_sizes:
            for runtime in self.runtimes:
                times = (f"{_shown(1e6 * self.latency(name, runtime, size))} µs" for name in _NETWORKS)
                ratios = repr(self.speedup(runtime, size)), repr(self.speedup(runtime, size, against="eager"))
                rows.append((f"{runtime}, batch {size}", *times, *ratios))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        lines += [f"{runtime} was left out: {reason}" for runtime, reason in self.skipped.items()]
        return "\n".join(line.rstrip() for line in lines)

    def _size_rows(self) -> list[tuple[str, int, int, str, int]]:
        dense, slim = self.sizes["dense"], self.sizes["slim"]
        rows = [
            ("parameters", dense.parameters, slim.parameters, "", 1),
            ("non-zero", dense.nonzeros, slim.nonzeros, "", 1),
            ("arithmetic", dense.flops, slim.flops, " kFLOP", 1000),
            ("saved", dense.folder_bytes, slim.folder_bytes, " KiB", 1024),
            ("peak memory", dense.peak_bytes, slim.peak_bytes, " KiB", 1024),
        ]
        files = [(f"{r} file", dense.file_bytes[r], slim.file_bytes[r], " KiB", 1024) for r in dense.file_bytes]
        return rows + files

    def _rounds(self, network: str, runtime: str, batch_size: int) -> tuple[float, ...]:
        key = (network, runtime, batch_size)
        if key not in self.seconds:
            raise KeyError(
                f"Nothing was measured for {key}. There are {', '.join(self.runtimes)} with batches of "
                f"{', '.join(map(str, self.batch_sizes))}."
            )
        return self.seconds[key]


def benchmark(
    dense: nn.Module,
    slim: nn.Module,
    *,
    example: Inputs,
    others: Mapping[str, nn.Module] | None = None,
    batch_sizes: Sequence[int] = (1, 64),
    runtimes: Sequence[str] | None = None,
    rounds: int = 30,
) -> Benchmark:
    """Compare a network with its slim form on the CPU: size, arithmetic, memory, time.

    Neither network is changed. Threads are as many as `torch.get_num_threads()`, in every runtime.

    Args:
        dense: the original; of a Bayesian network, its mean network.
        slim: its smaller form, for example from `compact`; likewise.
        example: inputs of both: a tensor, a tuple of arguments or a dict; its rows are repeated to fill a batch.
        others: further plain networks by name, timed beside the two in eager PyTorch.
        batch_sizes: how many examples in a call.
        runtimes: some of "eager", "compile", "onnxruntime" and "onnxruntime-int8"; if not given, all that are here but
            "compile", which takes long to prepare.
        rounds: how often each is timed.

    Raises:
        ShapeMismatch: if a network does not take the example at a batch size.
        MissingExtra: if a runtime that is asked for is not installed.
    """
    named = {"dense": dense, "slim": slim, **(others or {})}
    if len(named) < 2 + len(others or {}):
        raise ValueError(f'others needs names beside "dense" and "slim". Got {", ".join(others or {})}.')
    for network in named.values():
        if not isinstance(network, nn.Module):
            raise TypeError(
                f"benchmark compares two torch.nn.Modules. Got {type(network).__name__}. Of a quantised network, pass "
                "its .network."
            )
    _check(batch_sizes, runtimes, rounds)
    plain = {
        name: network.mean_network() if isinstance(network, Bayesian) else network for name, network in named.items()
    }
    networks = {name: evaluating_copy(network).cpu() for name, network in plain.items()}
    example = to_device(example, "cpu")
    inputs = {size: with_batch_size(example, size) for size in batch_sizes}
    for network in networks.values():
        for batch in inputs.values():
            run_example(network, batch)
    skipped: dict[str, str] = {}
    pair = {name: networks[name] for name in _NETWORKS}
    entries = _prepared(pair, example, available() if runtimes is None else runtimes, runtimes is None, skipped)
    sizes = {}
    for name, network in pair.items():
        files = {key[1]: e.file_bytes for key, e in entries.items() if key[0] == name and e.file_bytes is not None}
        sizes[name] = _size(network, with_batch_size(example, 1), inputs[max(batch_sizes)], files)
    for name in others or {}:
        entries[name, "eager"] = Preparation(networks[name], batches(networks[name], example))("eager")
    seconds = {}
    for size, batch in inputs.items():
        runs = {(*key, size): entry.bind(batch) for key, entry in entries.items()}
        seconds.update(_take_turns(runs, rounds, f"timing, batch {size}"))
    return Benchmark(sizes, seconds, _environment(rounds), skipped)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _prepared(
    networks: dict[str, nn.Module], example: Inputs, runtimes: Sequence[str], forgiving: bool, skipped: dict[str, str]
) -> dict[tuple[str, str], Contender]:
    """Prepare both networks in every runtime.

    With `forgiving`, a runtime other than eager that fails is left out, and `skipped` gets the reason. Otherwise its
    error is raised.
    """
    entries: dict[tuple[str, str], Contender] = {}
    preparations = {name: Preparation(network, batches(network, example)) for name, network in networks.items()}
    for runtime in runtimes:
        try:
            with quiet():
                both = {(name, runtime): prepare(runtime) for name, prepare in preparations.items()}
                for entry in both.values():
                    entry.bind(example)()
        except Exception as error:
            if not forgiving or runtime == "eager":
                raise
            skipped[runtime] = str(error) or repr(error)
        else:
            entries |= both
    return entries


def _take_turns(
    runs: dict[tuple[str, str, int], Callable[[], Any]], rounds: int, label: str
) -> dict[tuple[str, str, int], tuple[float, ...]]:
    calls = {}
    for key, run in runs.items():
        with quiet():  # the compiler starts now
            _timed(run, 3)
        calls[key] = max(1, math.ceil(_MIN_SECONDS_PER_TIMING / max(_timed(run, 3), 1e-9)))
    taken: dict[tuple[str, str, int], list[float]] = {key: [] for key in runs}
    for turn in progress(range(rounds), label):
        # every other round backwards, so that no contender always follows the same one
        for key in list(runs) if turn % 2 == 0 else reversed(list(runs)):
            taken[key].append(_timed(runs[key], calls[key]))
    return {key: tuple(values) for key, values in taken.items()}


def _timed(run: Callable[[], Any], calls: int) -> float:
    """Return the median seconds of a call, which a pause of one does not change."""
    taken = []
    for _ in range(calls):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _size(network: nn.Module, single: Inputs, largest: Inputs, files: dict[str, int]) -> Size:
    counted = cost(network, single)
    with TemporaryDirectory() as folder:
        save(network, folder)
        stored = sum(file.stat().st_size for file in Path(folder).iterdir())
    return Size(counted.parameters, counted.nonzeros, counted.flops, stored, peak_bytes(network, largest), files)


def _environment(rounds: int) -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "processor": platform.processor() or torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "onnxruntime": version("onnxruntime") if find_spec("onnxruntime") else None,
        "rounds": rounds,
    }


def _check(batch_sizes: Sequence[int], runtimes: Sequence[str] | None, rounds: int) -> None:
    if not batch_sizes or any(size < 1 for size in batch_sizes):
        raise ValueError(f"batch_sizes must be positive numbers. Got {batch_sizes!r}.")
    if rounds < 2:
        raise ValueError(f"rounds must be at least 2, to have a spread. Got {rounds}.")
    if runtimes is not None and (isinstance(runtimes, str) or "eager" not in runtimes or set(runtimes) - set(RUNTIMES)):
        raise ValueError(
            f'runtimes must be several of {", ".join(RUNTIMES)}, with "eager" among them, to which all are compared. '
            f"Got {runtimes!r}."
        )
