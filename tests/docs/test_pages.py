"""The pages: links lead somewhere, code uses names that exist, and the README's example prints what it says."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import bayeslim as bl

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "start").glob("*.md")),
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_README_LINES = 180


def blocks(page: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [content for name, content in fenced if name == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in targets:
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name} links to {target}"


def code_of(page: Path) -> list[ast.Module]:
    """Parse the blocks of a page and the code in its sentences, as far as that is Python."""
    if page.suffix == ".py":
        return [ast.parse(page.read_text())]
    found = [ast.parse(block) for block in blocks(page, "python")]
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for inline in re.findall(r"`([^`]*\bbl\.[^`]*)`", text):
        with contextlib.suppress(SyntaxError):
            found.append(ast.parse(inline))
    return found


def named(node: ast.expr) -> str:
    """Write an expression such as bl.priors.Normal as its dotted name; "" for any other."""
    words = []
    while isinstance(node, ast.Attribute):
        words.insert(0, node.attr)
        node = node.value
    return ".".join(["bl", *words]) if words and isinstance(node, ast.Name) and node.id == "bl" else ""


def value_of(name: str) -> object:
    """Find what a dotted name stands for, as far as modules, classes and their members go."""
    found: object = bl
    for word in name.split(".")[1:]:
        if not inspect.ismodule(found) and not inspect.isclass(found):
            break
        assert hasattr(found, word), name
        found = getattr(found, word)
    return found


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda page: page.name)
def test_code_uses_names_and_arguments_that_exist(page):
    for node in (node for tree in code_of(page) for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute):
            value_of(named(node))
        if not isinstance(node, ast.Call) or not callable(called := value_of(named(node.func))):
            continue
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if named(node.func) and not any(
            isinstance(one, ast.Starred) or (isinstance(one, ast.Constant) and one.value is ...) for one in given
        ):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
            bind = inspect.signature(called).bind_partial if len(keywords) < len(node.keywords) else None
            (bind or inspect.signature(called).bind)(*node.args, **keywords)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_the_readmes_example_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example, deploy = blocks(ROOT / "README.md", "python")[:2]
    scope: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), scope)
    said, promised = capsys.readouterr().out, next(b for b in blocks(ROOT / "README.md", "") if b.startswith("dense:"))
    line = re.compile(r"(\w+): ([\d,]+) parameters, test error ([\d.]+)%")
    for (name, size, error), (wanted, expected, _) in zip(line.findall(said), line.findall(promised), strict=True):
        assert name == wanted
        assert int(size.replace(",", "")) == pytest.approx(int(expected.replace(",", "")), rel=0.03)
        assert float(error) < 6  # rounding differs between machines
    exec(compile(deploy, "README.md", "exec"), scope)
    assert (tmp_path / "slim.onnx").exists()
    assert (tmp_path / "slim").is_dir()


def test_every_tutorial_has_a_heading_and_a_plot():
    assert len(EXAMPLES) >= 6
    for example in EXAMPLES:
        assert re.match(r'"""\n\S.*\n=+\n', example.read_text())
        assert "plt.show()" in example.read_text()


def test_docstrings_become_restructured_text():
    path = ROOT / "docs" / "rst.py"
    spec = importlib.util.spec_from_file_location("docs_rst", path)
    assert spec is not None
    assert spec.loader is not None
    rst = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rst)
    given = ["Scores |mu| of `x_` and plain `nn.Module`s.", "", "    a = b*c", "", "Args:", "    x: *any* kind."]
    assert rst.as_rst_lines(given) == [
        "Scores \\|mu\\| of `x_` and plain `nn.Module`\\ s.",
        "",
        ".. code-block:: text",
        "",
        "    a = b*c",
        "",
        "Args:",
        "    x: \\*any\\* kind.",
    ]
    assert rst.as_rst_lines(["Text.", ">>> f(*x)", "3"]) == ["Text.", "", ">>> f(*x)", "3"]
