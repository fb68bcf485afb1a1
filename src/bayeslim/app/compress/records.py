"""The results of stages as files, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from bayeslim.app.benchmark import Benchmark, Size
from bayeslim.app.report.overview import Row
from bayeslim.app.report.scores import Scores
from bayeslim.compact import Cost
from bayeslim.errors import CorruptFile
from bayeslim.export.files import write_file
from bayeslim.io.networks import config_of
from bayeslim.io.saving import load, save
from bayeslim.metrics import Calibration
from bayeslim.types import Inputs


def save_slim(network: nn.Module, path: Path, example: Inputs) -> None:
    """Write a compacted network so that it can be read without its class."""
    save(network, path, example=example if config_of(network) is None else None)


def load_slim(path: Path, architecture: nn.Module) -> nn.Module:
    """Read a compacted network."""
    try:
        return cast("nn.Module", load(path, architecture)).eval()
    except CorruptFile:  # its graph stands for it where its class cannot take the new sizes
        return cast("nn.Module", load(path)).eval()


def save_json(value: Any, path: Path) -> None:
    """Write plain data."""
    write_file(path, json.dumps(value, indent=1).encode())


def load_json(path: Path) -> Any:
    """Read plain data."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error


def save_rows(rows: Mapping[str, Row], path: Path) -> None:
    """Write an overview."""
    save_json({name: _row_as_json(row) for name, row in rows.items()}, path)


def load_rows(path: Path) -> dict[str, Row]:
    """Read an overview."""
    found = load_json(path)
    try:
        return {name: _row(row) for name, row in found.items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def save_benchmark(found: Benchmark, path: Path) -> None:
    """Write a benchmark."""
    found.to_json(path)


def load_benchmark(path: Path) -> Benchmark:
    """Read a benchmark."""
    found = load_json(path)
    try:
        seconds = {(t["network"], t["runtime"], t["batch_size"]): tuple(t["seconds"]) for t in found["timings"]}
        sizes = {name: Size(**size) for name, size in found["sizes"].items()}
        return Benchmark(sizes, seconds, found["environment"], found["skipped"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def is_written(value: Any, path: Path) -> None:
    """For a stage that wrote its file itself."""


def _row_as_json(row: Row) -> dict[str, Any]:
    scores = None
    if row.scores is not None:
        curve = {name: value.tolist() for name, value in vars(row.scores.calibration).items()}
        scores = vars(row.scores) | {"calibration": curve}
    return {"scores": scores, "cost": None if row.cost is None else asdict(row.cost), "seconds": row.seconds}


def _row(found: Mapping[str, Any]) -> Row:
    scores = None
    if found["scores"] is not None:
        curve = Calibration(**{name: torch.tensor(value) for name, value in found["scores"]["calibration"].items()})
        scores = Scores(**{**found["scores"], "calibration": curve})
    return Row(scores, None if found["cost"] is None else Cost(**found["cost"]), found["seconds"])


def _damaged(path: Path, error: Exception) -> CorruptFile:
    return CorruptFile(f"{path} is damaged ({error!r}). Delete it to make it again.")
