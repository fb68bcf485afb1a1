"""Atomic writing of a file: after a kill it is as it was or complete."""

from __future__ import annotations

from pathlib import Path

from bayeslim.errors import BayeslimError
from bayeslim.io.storage import replace_file


def write_file(path: Path, content: bytes) -> None:
    """Write a file under another name, then rename it.

    Raises:
        BayeslimError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise BayeslimError(
            f"Could not write {path}: {error.strerror or error}. The older file is untouched. "
            "Choose a place you may write to, with space left."
        ) from error
