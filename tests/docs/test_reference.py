"""The API reference: every public name has a summary and an example, and every example runs."""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bayeslim as bl
from bayeslim.app.compress import pipeline

spec = importlib.util.spec_from_file_location("reference", Path(__file__).parents[2] / "docs" / "reference.py")
assert spec is not None
assert spec.loader is not None
reference = importlib.util.module_from_spec(spec)
sys.modules["reference"] = reference
spec.loader.exec_module(reference)

CASES = [(space, names) for space, found in reference.EXAMPLES.items() for names in found]


@pytest.fixture(scope="module")
def start() -> dict[str, Any]:
    """Names that all examples start from."""
    scope: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(reference.START, "the start of the examples", "exec"), scope)
    return scope


@pytest.mark.filterwarnings("ignore")  # what other libraries say when they are imported
@pytest.mark.parametrize("space", [".", *reference.NAMESPACES, *reference.BRIDGES])
def test_every_public_name_has_a_summary_and_an_example(space):
    public = reference.public(space)
    assert public
    assert [name for name, value in public.items() if not (value.__doc__ or "").strip()] == []
    assert reference.without_example(space) == []
    assert {name for names in reference.EXAMPLES.get(space, {}) for name in names} <= public.keys()


@pytest.mark.parametrize(("space", "names"), CASES, ids=[f"{space}-{names[0]}" for space, names in CASES])
@pytest.mark.filterwarnings("ignore")  # trainings are short, and other libraries give advice
def test_the_example_runs_and_shows_its_names(space, names, start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    brief = functools.partial(bl.benchmark, runtimes=["eager"], rounds=2, batch_sizes=(1,))
    monkeypatch.setattr(pipeline, "benchmark", brief)  # every runtime is timed in tests/app/test_benchmark.py
    code = reference.EXAMPLES[space][names]
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []
    scope = {key: copy.deepcopy(value) if key in ("model", "bnn") else value for key, value in start.items()}
    exec(compile(code, f"the example of {names[0]}", "exec"), scope)
