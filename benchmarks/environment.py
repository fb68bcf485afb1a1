"""The environment of a benchmark: machine, versions and commit.

A number without its environment cannot be compared with another, so `save` writes both.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"


def environment(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Describe the machine, the versions of packages and the commit.

    Args:
        packages: distributions whose versions are recorded beside torch's and numpy's; absent ones are left out.
    """
    facts: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": versions(["torch", "numpy", *packages]),
        "commit": _git("rev-parse", "HEAD"),
        "changed": (_git("status", "--porcelain", "--", "src") or "").splitlines(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Look up installed versions by distribution; absent ones are left out."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def save(name: str, results: dict[str, Any], packages: Iterable[str] = (), folder: Path = RESULTS) -> Path:
    """Write `results` and their environment to `<folder>/<name>.json`, atomically.

    Results of a tree with changes, or of no commit, get a "provenance" that says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    temporary = path.with_suffix(".json.part")
    facts = environment(packages)
    doubt = provenance(facts)
    marked = ({} if doubt is None else {"provenance": doubt}) | {"environment": facts, **results}
    temporary.write_text(json.dumps(marked, indent=1) + "\n")
    temporary.replace(path)
    return path


def provenance(facts: Mapping[str, Any]) -> str | None:
    """Say why results cannot be traced to a commit; None if they can."""
    if not facts.get("commit"):
        return "The commit was not recorded: run it again before you rely on these numbers."
    if "changed" not in facts:
        return "It was not recorded whether src/ had changes: run it again before you rely on these numbers."
    if facts["changed"]:
        return (
            "Run with changes in src/ that were not committed (environment.changed): run it again before you rely on "
            "these numbers."
        )
    return None


def _processor() -> str:
    """Find the CPU's name: by `lscpu` on Linux, by `platform` elsewhere."""
    try:
        described = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in described.splitlines() if line.startswith("Model name")]
    return named[0] if named else platform.processor()


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip("\n")
