"""Commands as a person types them, in this process."""

from __future__ import annotations

import pytest

from bayeslim.app.cli.app import app


def call(*words: object) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        app([str(word) for word in words])
    return int(ended.value.code or 0)
