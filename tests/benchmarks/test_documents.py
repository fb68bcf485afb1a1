"""The tables of the documents are those that the results give; none is typed by hand."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def documents(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("documents")


def test_documents_show_the_tables_of_the_results(documents):
    for name in documents.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert documents.updated(text) == text, f"{name}: run python benchmarks/documents.py --write"


def test_every_table_of_numbers_in_the_results_is_written(documents):
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    typed = re.sub(r"<!-- begin (.+?) -->.*?<!-- end \1 -->", "", text, flags=re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", typed, flags=re.MULTILINE)
    assert len(tables) == 1
    assert tables[0].startswith("| | LeNet-300-100 | LeNet-5 |\n|---|---|---|\n| OLMP")  # published numbers


def test_a_stale_table_is_replaced_and_a_wrong_name_refused(documents):
    text = "before\n<!-- begin residual pruning -->\nold\n<!-- end residual pruning -->\nafter\n"
    written = documents.updated(text)
    assert written.startswith("before\n<!-- begin residual pruning -->\n\n| weights cut |")
    assert written.endswith(" |\n\n<!-- end residual pruning -->\nafter\n")
    assert "old" not in written
    assert documents.updated(written) == written
    with pytest.raises(ValueError, match='No table is called "nothing"'):
        documents.updated("<!-- begin nothing -->\n<!-- end nothing -->")


def test_results_that_are_missing_say_so(documents, monkeypatch):
    monkeypatch.setattr(documents, "results", dict)
    assert documents.block("many models") == "*Not measured yet.*\n"
