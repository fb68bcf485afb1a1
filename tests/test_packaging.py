"""The package as it is installed: versions agree, and the command line says which extra it needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bayeslim as bl

ROOT = Path(__file__).parents[1]
WITHOUT_TYPER = """
import contextlib, io, json, sys
sys.modules["typer"] = None
from bayeslim.app.cli import main
found = {}
for word in ("--help", "demo", "--version"):
    sys.argv, code, out, err = ["bayeslim", word], 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    words = err.getvalue()
    if isinstance(code, str):  # the interpreter prints it and exits with 1
        code, words = 1, words + code
    found[word] = code, out.getvalue(), words
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[int, str, str]]:
    """Exit codes and words of commands in a process that has no typer."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TYPER], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


def test_versions_agree():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert cited is not None
    assert cited[1] == bl.__version__


@pytest.mark.parametrize("word", ["--help", "demo"])
def test_without_its_extra_the_command_line_says_which_to_install(said, word):
    code, _, error = said[word]
    assert code == 1
    assert "pip install 'bayeslim[cli]'" in error
    assert "Traceback" not in error


def test_the_version_needs_no_extra(said):
    assert said["--version"][:2] == [0, f"{bl.__version__}\n"]


def test_types_and_data_are_in_the_package():
    package = Path(bl.__file__).parent
    for name in ("py.typed", "__init__.pyi", "app/data/digits.npz", "app/report/page.html.jinja"):
        assert (package / name).is_file()
