"""Importing the library is quick and imports nothing optional."""

from __future__ import annotations

import json
import subprocess
import sys

OPTIONAL = ["matplotlib", "rich", "typer", "onnx", "onnxruntime", "onnxscript", "jinja2", "scipy", "sklearn", "pandas"]


def run(script: str):
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout)


def test_nothing_optional_is_imported():
    loaded = run("import bayeslim, sys, json; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))")
    assert "torch" in loaded
    assert not set(OPTIONAL) & set(loaded)


def test_is_not_much_slower_than_importing_torch():
    script = (
        "import time, json; a = time.perf_counter(); import torch; b = time.perf_counter(); import bayeslim; "
        "print(json.dumps([b - a, time.perf_counter() - b]))"
    )
    # the quickest of three, since other work on the machine only ever slows one down
    torch_seconds, own_seconds = map(min, zip(*(run(script) for _ in range(3)), strict=True))
    assert own_seconds < 0.5 * torch_seconds + 0.3


def test_importing_leaves_the_random_state_alone():
    same = run(
        "import torch, json; torch.manual_seed(0); a = torch.get_rng_state(); import bayeslim; "
        "print(json.dumps(torch.equal(a, torch.get_rng_state())))"
    )
    assert same
