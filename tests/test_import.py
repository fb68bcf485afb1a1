"""Importing the library is quick and imports nothing optional."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

OPTIONAL = ["matplotlib", "rich", "typer", "onnx", "onnxruntime", "onnxscript", "jinja2", "scipy", "sklearn", "pandas"]


SCRIPT = """
import json, sys, time
started = time.perf_counter()
import torch
torch_is_there = time.perf_counter()
torch.manual_seed(0)
before = torch.get_rng_state()
import bayeslim
seconds = torch_is_there - started, time.perf_counter() - torch_is_there
loaded = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps({"seconds": seconds, "loaded": loaded, "same": torch.equal(before, torch.get_rng_state())}))
"""


@pytest.fixture(scope="module")
def imports():
    """Measure imports in two fresh processes."""
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=120)
        for _ in range(2)
    ]
    return [json.loads(run.stdout) for run in runs]


def test_nothing_optional_is_imported(imports):
    assert "torch" in imports[0]["loaded"]
    assert not set(OPTIONAL) & set(imports[0]["loaded"])


def test_is_not_much_slower_than_importing_torch(imports):
    # the quicker of two, since other work on the machine only ever slows one down
    torch_seconds, own_seconds = map(min, zip(*(found["seconds"] for found in imports), strict=True))
    assert own_seconds < 0.5 * torch_seconds + 0.3


def test_importing_leaves_the_random_state_alone(imports):
    assert imports[0]["same"]
