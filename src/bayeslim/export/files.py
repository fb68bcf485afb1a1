"""A file takes its place in one step: whatever moment a process is killed at, it is as it was or complete."""

from __future__ import annotations

from pathlib import Path

from bayeslim.errors import BayeslimError
from bayeslim.io.storage import replace_file


def write_file(path: Path, content: bytes) -> None:
    """Write a file under another name, then rename it.

    Raises:
        BayeslimError: if that is not possible.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise BayeslimError(
            f"Could not write {path}: {error.strerror or error}. What was there before is untouched. "
            "Choose a place you may write to, with space left."
        ) from error
