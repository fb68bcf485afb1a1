"""The package as it is installed: versions agree, and the command line says which extra it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bayeslim as bl

ROOT = Path(__file__).parents[1]
WITHOUT_TYPER = """
import sys
sys.modules["typer"] = None
sys.argv = ["bayeslim", *sys.argv[1:]]
from bayeslim.app.cli import main
main()
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TYPER, *words], capture_output=True, text=True, timeout=120, env=os.environ
    )


def test_versions_agree():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert cited is not None
    assert cited[1] == bl.__version__


@pytest.mark.parametrize("words", [("--help",), ("demo",)])
def test_without_its_extra_the_command_line_says_which_to_install(words):
    found = run(*words)
    assert found.returncode == 1
    assert "pip install 'bayeslim[cli]'" in found.stderr
    assert "Traceback" not in found.stderr


def test_the_version_needs_no_extra():
    assert run("--version").stdout == f"{bl.__version__}\n"


def test_types_and_data_are_in_the_package():
    package = Path(bl.__file__).parent
    for name in ("py.typed", "app/data/digits.npz", "app/report/page.html.jinja"):
        assert (package / name).is_file()
