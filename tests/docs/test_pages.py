"""The pages: links lead somewhere, code uses names that exist, and the README's example prints what it says."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import bayeslim as bl

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
START = sorted((ROOT / "docs" / "start").glob("*.md"))
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


@pytest.mark.parametrize("page", [*PAGES, *START, *EXAMPLES], ids=lambda page: page.name)
def test_code_uses_names_that_exist(page):
    for block in [page.read_text()] if page in EXAMPLES else blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            names = []
            while isinstance(node, ast.Attribute):
                names.insert(0, node.attr)
                node = node.value
            if names and isinstance(node, ast.Name) and node.id == "bl":
                found = bl
                for name in names[:2] if hasattr(getattr(bl, names[0], None), "__path__") else names[:1]:
                    assert hasattr(found, name), f"{page.name} uses bl.{'.'.join(names)}"
                    found = getattr(found, name)


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
