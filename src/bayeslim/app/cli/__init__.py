"""The command line: one command per verb."""

from __future__ import annotations

import sys

from bayeslim.version import __version__


def main() -> None:
    """Run the command line, or say which extra to install."""
    if sys.argv[1:] == ["--version"]:  # answered without any extra
        print(__version__)
        return
    try:
        from bayeslim.app.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"The command line needs {error.name}, which is not installed. Run: pip install 'bayeslim[cli]'")
    app()
