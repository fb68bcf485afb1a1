"""Every result file names the commit of a clean tree, or says that it does not; the documents mark those."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted((BENCHMARKS / "results").glob("*.json"))
_spec = importlib.util.spec_from_file_location("environment_of_benchmarks", BENCHMARKS / "environment.py")
assert _spec is not None
assert _spec.loader is not None
environment = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(environment)


def is_marked(content: dict[str, object]) -> bool:
    """Whether results cannot be traced to a commit, or are from a default that has changed."""
    return "provenance" in content or "outdated" in content


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_can_be_traced_or_say_that_they_cannot(file):
    content = json.loads(file.read_text())
    assert content.get("provenance") == environment.provenance(content["environment"])
    listed = f"`{file.name}`" in (BENCHMARKS / "README.md").read_text().partition("## ")[0]
    assert listed == is_marked(content)


def test_published_tables_mark_results_that_wait_for_another_run():
    contents = {file.stem: json.loads(file.read_text()) for file in FILES}
    marked = {name for name, content in contents.items() if is_marked(content)}
    assert marked
    found = set()
    for line in (BENCHMARKS.parent / "docs" / "results.md").read_text().splitlines():
        named = {name for name in re.findall(r"benchmarks/(\w+)\.py", line) if name in contents}
        assert ("†" in line) == bool(named & marked) or not named, line
        found |= named & marked
    assert found


def test_new_results_are_marked_by_the_tree_they_came_from(tmp_path, monkeypatch):
    for commit, changed, doubt in (
        ("abc", [], None),
        ("abc", [" M src/x.py"], "not committed"),
        (None, [], "not recorded"),
    ):
        monkeypatch.setattr(environment, "environment", lambda _, c=commit, d=changed: {"commit": c, "changed": d})
        found = json.loads(environment.save("x", {"value": 1}, folder=tmp_path).read_text())
        assert found["value"] == 1
        assert (doubt is None) == ("provenance" not in found)
        assert doubt is None or doubt in found["provenance"]
