"""A file takes its place in one step: whatever moment a process is killed at, it is as it was or complete."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from bayeslim.errors import BayeslimError


def write_file(path: Path, content: bytes) -> None:
    """Write a file under another name, then rename it.

    Raises:
        BayeslimError: if that is not possible.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise BayeslimError(
            f"Could not write {path}: {error.strerror or error}. What was there before is untouched. "
            "Choose a place you may write to, with space left."
        ) from error
