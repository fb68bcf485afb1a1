"""The folders of data files and of downloads.

A set's files lie in a folder of its name, under one of these roots, the first that has the file: the `root` that was
passed; or else `$BAYESLIM_DATA`, then `bayeslim` in `$XDG_CACHE_HOME` (by default `~/.cache`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def roots(root: str | Path | None = None) -> list[Path]:
    """List the folders that are searched, in order."""
    if root is not None:
        return [Path(root).expanduser()]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bayeslim"
    own = os.environ.get("BAYESLIM_DATA")
    return [Path(own).expanduser(), cache] if own else [cache]


def locate(candidates: Iterable[str], root: str | Path | None = None) -> Path | None:
    """Find the first of the relative paths `candidates` that exists under a root."""
    paths = (folder / name for folder in roots(root) for name in candidates)
    return next((path for path in paths if path.exists()), None)


def destination(root: str | Path | None = None) -> Path:
    """Choose the root for new files: the first that can be written, or else the last."""
    return next((folder for folder in roots(root) if _writable(folder)), roots(root)[-1])


def _writable(folder: Path) -> bool:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)
