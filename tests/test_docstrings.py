"""The language of the source: short first lines of docstrings, plain words in docstrings and comments."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bayeslim

ROOT = Path(bayeslim.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

MAX_FIRST_LINE = 80
STARTS = ("What ", "That which ")
WORDS = re.compile(r"\b(nobody|a\s+say|takes\s+a\s+while|the\s+very\s+same|how\s+manieth)\b", re.IGNORECASE)


def bad_first_lines(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if len(first) > MAX_FIRST_LINE:
                yield f"line {node.lineno}, {node.name}: {len(first)} characters: {first}"
            if first.startswith(STARTS):
                yield f"line {node.lineno}, {node.name}: begin with a verb or a noun: {first}"


MAYBE = re.compile(WORDS.pattern.replace(r"\s", r"[\s#]"), re.IGNORECASE)
"""Matches the source of every comment and docstring that `WORDS` matches: parsing and tokenizing take much longer."""


def bad_words(source: str) -> Iterator[str]:
    if not MAYBE.search(source):
        return
    for line, text in prose(source):
        for found in WORDS.finditer(text):
            yield f'line {line + text.count(chr(10), 0, found.start())}: "{found.group()}"'


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, those of attributes included, and the blocks of comments, with their first lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for line in comments:
        if line - 1 not in comments:
            block = [comments[line]]
            while line + len(block) in comments:
                block.append(comments[line + len(block)])
            yield line, "\n".join(block)


def found_in_all(find: Callable[[str], Iterator[str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}, {one}" for path in FILES for one in find(path.read_text(encoding="utf-8"))]


def test_there_are_files() -> None:
    assert len(FILES) > 100


def test_first_lines_are_short() -> None:
    assert found_in_all(bad_first_lines) == []


def test_words_are_plain() -> None:
    assert found_in_all(bad_words) == []


@pytest.mark.parametrize("first", ["x" * 81, "What it returns.", "That which it returns."])
@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_a_bad_first_line_is_found(keyword: str, first: str) -> None:
    found = list(bad_first_lines(f'class A:\n    {keyword} f():\n        """{first}\n\n        More.\n        """\n'))
    assert len(found) == 1
    assert found[0].startswith("line 2, f: ")


def test_good_first_lines_are_not_found() -> None:
    assert not list(bad_first_lines(f'def f():\n    """{"x" * 80}\n\n    {"x" * 81}\n    """\ndef g(): pass\n'))


@pytest.mark.parametrize("word", ["nobody", "Nobody", "a say", "takes a while", "the very same", "how manieth"])
def test_a_bad_word_is_found(word: str) -> None:
    first, _, rest = word.partition(" ")
    for source, line in (
        (f'"""One.\n\nHere {word} is.\n"""\n', 3),
        (f'x = 1\n"""Here {word} is."""\n', 2),
        (f"x = 1  # here {word} is\n", 1),
        (f"x = 1\n# here {first}\n# {rest} is\n", 2),
    ):
        assert [problem.partition(":")[0] for problem in bad_words(source)] == [f"line {line}"]


def test_other_words_and_plain_strings_are_not_found() -> None:
    assert not list(bad_words('x = "nobody"  # a saying\n"""The same."""\n'))
