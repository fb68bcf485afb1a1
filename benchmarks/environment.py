"""The environment of a benchmark: machine, versions and commit.

    python benchmarks/environment.py FILE ...     find the commit of results from a machine without the history

A number without its environment cannot be compared with another, so `save` writes both. A copy of the sources without
their history still has the hash that git gives the folder `src`; a commit whose `src` has that hash is the commit the
results came from.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
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
        "source": _hash_of_source(),
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


def find_commit(path: Path) -> str | None:
    """Enter the latest commit with the sources of a results file into it; None if there is none."""
    results = json.loads(path.read_text())
    facts = results["environment"]
    for commit in (_git("log", "--format=%H", "--", "src") or "").splitlines():
        if _git("rev-parse", f"{commit}:src") == facts.get("source"):
            facts |= {"commit": commit, "changed": []}
            results.pop("provenance", None)
            path.write_text(json.dumps(results, indent=1) + "\n")
            return commit
    return None


def _hash_of_source() -> str | None:
    """Hash `src` as git does, with its uncommitted changes, through an index of its own."""
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        if _git("add", "src", **index) is None:
            return None
        return _git("write-tree", "--prefix=src/", **index)


def _processor() -> str:
    """Find the CPU's name: by `lscpu` on Linux, by `platform` elsewhere."""
    try:
        described = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in described.splitlines() if line.startswith("Model name")]
    return named[0] if named else platform.processor()


def _git(*arguments: str, **variables: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ | variables
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip("\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, find_commit(Path(argument)) or "no commit has these sources")
