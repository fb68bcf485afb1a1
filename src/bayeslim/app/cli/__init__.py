"""The command line: one command per verb."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, with a clear word if its dependencies are missing."""
    try:
        from bayeslim.app.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"The command line needs {error.name}, which is not installed. Run: pip install 'bayeslim[cli]'")
    app()
