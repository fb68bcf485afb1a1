"""The results of stages as files, and back."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import nn

from bayeslim.app.benchmark import Benchmark, Size
from bayeslim.app.report.overview import DENSE, MAGNITUDE, SLIM, Row
from bayeslim.errors import CorruptFile, UnsupportedModel
from bayeslim.io.files import write_file
from bayeslim.io.networks import config_of
from bayeslim.io.saving import load, save
from bayeslim.types import Inputs

T = TypeVar("T")


@dataclass(frozen=True)
class ExportedFiles:
    """The SHA-256 of the files that an export wrote, and notes on formats left out."""

    files: Mapping[str, str]
    notes: tuple[str, ...]


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_slim(network: nn.Module, path: Path, example: Inputs) -> None:
    """Write a compacted network so that it can be read without its class."""
    save(network, path, example=example if config_of(network) is None else None)


def load_slim(path: Path, architecture: nn.Module) -> nn.Module:
    """Read a compacted network, as a graph where its class cannot take the new sizes."""
    try:
        return cast("nn.Module", load(path, architecture)).eval()
    except (CorruptFile, UnsupportedModel):
        return cast("nn.Module", load(path)).eval()


def save_exported(found: ExportedFiles, path: Path) -> None:
    """Write the names and checksums of exported files."""
    _write(asdict(found), path)


def load_exported(path: Path) -> ExportedFiles:
    """Read the names and checksums of exported files."""
    return _read(path, _exported)


def save_rows(rows: Mapping[str, Row], path: Path) -> None:
    """Write an overview."""
    _write({name: _row_as_json(row) for name, row in rows.items()}, path)


def load_rows(path: Path) -> dict[str, Row]:
    """Read an overview."""
    return _read(path, _rows)


def save_benchmark(found: Benchmark, path: Path) -> None:
    """Write a benchmark."""
    found.to_json(path)


def load_benchmark(path: Path) -> Benchmark:
    """Read a benchmark."""
    return _read(path, _benchmark)


def is_written(value: Any, path: Path) -> None:
    """Do nothing, for a stage that wrote its file itself."""


def _write(value: Any, path: Path) -> None:
    write_file(path, json.dumps(value, indent=1).encode())


def _read(path: Path, build: Callable[[Any], T]) -> T:
    """Read a JSON file and build its value.

    Raises:
        CorruptFile: if it is damaged; `build` checks every type.
    """
    try:
        return build(json.loads(path.read_text(encoding="utf-8")))
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError, RuntimeError) as error:
        raise CorruptFile(f"{path} is damaged ({error!r:.200}). Delete it to make it again.") from error


def _exported(found: Any) -> ExportedFiles:
    _check_keys(found, ("files", "notes"))
    files = _built(dict[str, str], found["files"])
    if any(Path(name).name != name for name in files):
        raise ValueError("it names a file outside of the run's folder")
    return ExportedFiles(files, tuple(_built(list[str], found["notes"])))


def _row_as_json(row: Row) -> dict[str, Any]:
    scores = None
    if row.scores is not None:
        curve = {name: value.tolist() for name, value in vars(row.scores.calibration).items()}
        scores = vars(row.scores) | {"calibration": curve}
    return {"scores": scores, "cost": None if row.cost is None else asdict(row.cost), "seconds": row.seconds}


def _rows(found: Any) -> dict[str, Row]:
    rows: dict[str, Row] = _built(dict[str, Row], found)
    _check_keys(rows, (DENSE, MAGNITUDE, SLIM))
    missing = [name for name in (DENSE, SLIM) if name not in rows]
    if missing:
        raise ValueError(f"no row for {', '.join(missing)}")
    return rows


def _benchmark(found: Any) -> Benchmark:
    _check_keys(found, ("environment", "sizes", "speedups", "skipped", "timings"))
    _check_keys(found["sizes"], ("dense", "slim"))
    for timing in found["timings"]:
        _check_keys(timing, ("network", "runtime", "batch_size", "seconds"))
    seconds = {
        (_built(str, t["network"]), _built(str, t["runtime"]), _built(int, t["batch_size"])): tuple(
            _built(list[float], t["seconds"])
        )
        for t in found["timings"]
    }
    sizes = {name: _built(Size, found["sizes"][name]) for name in ("dense", "slim")}
    skipped = _built(dict[str, str], found["skipped"])
    result = Benchmark(sizes, seconds, dict(found["environment"]), skipped)
    for runtime in result.runtimes:  # every pair that is compared is there, round for round
        for batch_size in result.batch_sizes:
            result.speedup(runtime, batch_size)
    if not seconds:
        raise ValueError("no timings")
    return result


def _check_keys(found: Any, known: Collection[str]) -> None:
    unknown = [str(key) for key in dict(found) if key not in known]
    if unknown:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")


def _built(kind: Any, value: Any) -> Any:
    """Build a value of a type from JSON, every part checked; a bool is no number."""
    inner = get_args(kind)
    if isinstance(kind, UnionType):
        return None if value is None else _built(inner[0], value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        _check_keys(value, hints)
        return kind(**{name: _built(hints[name], value[name]) for name in hints})  # type: ignore[operator]
    if kind is torch.Tensor:
        return torch.tensor(_built(list, value))
    origin = get_origin(kind) or kind
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else origin):
        raise TypeError(f"{value!r:.80} is not of type {origin.__name__}")
    parts: Any = value
    if inner and origin is list:
        return [_built(inner[0], part) for part in parts]
    if inner and origin is dict:
        return {_built(str, name): _built(inner[1], part) for name, part in parts.items()}
    if kind is not float:
        return value
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return float(value)
