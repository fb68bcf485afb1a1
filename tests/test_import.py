"""Importing the library imports nothing optional."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

OPTIONAL = ["matplotlib", "rich", "typer", "onnx", "onnxruntime", "onnxscript", "jinja2", "scipy", "sklearn", "pandas"]

SCRIPT = """
import json, sys
import torch
torch.manual_seed(0)
before = torch.get_rng_state()
import bayeslim
loaded = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps({"loaded": loaded, "same": torch.equal(before, torch.get_rng_state())}))
"""


@pytest.fixture(scope="module")
def imported():
    """Import the library in a fresh process."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=120)
    return json.loads(run.stdout)


def test_nothing_optional_is_imported(imported):
    assert "torch" in imported["loaded"]
    assert not set(OPTIONAL) & set(imported["loaded"])


def test_importing_leaves_the_random_state_alone(imported):
    assert imported["same"]
