"""The map of the library: imports go one way, from high layers to low ones.

`LAYERS` is the order, low to high. A module may import from its own folder and from lower layers. It is documentation
as much as a check: to read the library, start at either end.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import bayeslim

ROOT = Path(bayeslim.__file__).parent

LAYERS = (
    # words that every module shares
    "version errors",
    "io.registry",
    "types metrics results",
    "attention replica",
    "noise sites",
    # a problem: what is believed, and how targets follow from outputs
    "likelihoods priors",
    "io.lock",
    "io.storage",
    "io.files io.digest",
    "gates",
    # distributions over named parameters
    "posteriors",
    "families stochastic",
    "io.networks io.frozen io.state",
    # from a model and data to a posterior
    "train",
    "curvature",
    "methods.base",
    "bayesian",
    "predict",
    "evidence",
    "methods",
    "samplers",
    # functions of a posterior
    "diagnostics continual decide",
    "distill",
    "compact",
    "prune",
    "recipes",
    "coding",
    "quantise",
    "export",
    "io.saving",
    # programs
    "app",
    # the public names, and what is written in them
    "bayeslim",
    "gallery",
    "app.cli",
    # bridges to other libraries, each behind an extra
    "sklearn trainers botorch",
    "activeml",
    "__main__",
)

OPTIONAL = {
    "onnx",
    "onnxscript",
    "onnxruntime",
    "typer",
    "rich",
    "jinja2",
    "matplotlib",
    "pandas",
    "arviz",
    "sklearn",
    "skactiveml",
    "botorch",
    "lightning",
    "transformers",
}
"""Packages behind an extra. A module that needs one may be imported inside a function."""

MAX_FILES_AT_THE_ROOT = 16


@dataclass(frozen=True)
class Import:
    """A statement that imports `target`, or `name` from it."""

    source: str
    target: str
    name: str
    line: int
    is_deferred: bool

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


@cache
def modules() -> dict[str, ast.Module]:
    """Parse every module of the library, by its name without `bayeslim.`; the package itself is the empty name."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(file.read_text())
    return found


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for source, tree in modules().items() for found in imports_of(source, tree))


def imports_of(source: str, tree: ast.Module) -> Iterator[Import]:
    """Find all imports of bayeslim in a module, but for those that only a type checker sees."""
    for node, is_deferred in statements(tree, False):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "bayeslim":
            package = node.module.removeprefix("bayeslim").removeprefix(".")
            for alias in node.names:
                full = f"{package}.{alias.name}".removeprefix(".")
                yield Import(source, full if full in modules() else package, alias.name, node.lineno, is_deferred)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "bayeslim":
                    target = alias.name.removeprefix("bayeslim").removeprefix(".")
                    yield Import(source, target, "", node.lineno, is_deferred)


def statements(node: ast.AST, is_deferred: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child, is_deferred
        yield from statements(child, is_deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def needs_an_extra(module: str) -> bool:
    """Whether importing a module imports an optional package."""
    if any(
        name.split(".")[0] in OPTIONAL
        for node, is_deferred in statements(modules()[module], False)
        if not is_deferred and isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    ):
        return True
    return any(needs_an_extra(i.target) for i in imports() if i.source == module and not i.is_deferred)


def layer_of(module: str) -> tuple[int, str]:
    """Find the position of a module's layer, and its entry there: the longest that is a prefix of its name."""
    module = module or "bayeslim"
    entries = [(entry, i) for i, layer in enumerate(LAYERS) for entry in layer.split()]
    fitting = [(entry, i) for entry, i in entries if f"{module}.".startswith(f"{entry}.")]
    # A module that is in no layer stands above all layers.
    entry, position = max(fitting, key=lambda found: len(found[0]), default=("", len(LAYERS)))
    return position, entry


def circles() -> list[list[str]]:
    """Find all sets of modules that import each other, directly or not (Tarjan's algorithm)."""
    targets: dict[str, set[str]] = {module: set() for module in modules()}
    for found in imports():
        if found.target != found.source:
            targets[found.source].add(found.target)
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for target in targets[module]:
            if target not in index:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], index[target])
        if lowest[module] == index[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                circles.append(sorted(stack[at:]))
            del stack[at:]

    for module in targets:
        if module not in index:
            visit(module)
    return circles


def listed(lines: list[str]) -> str:
    return "\n".join(["", *lines])


def test_imports_are_found():
    assert any(i.source == "bayesian" and i.target == "methods.base" for i in imports())
    assert any(i.source == "" and i.target == "io.registry" for i in imports())
    assert not any(i.source == "types" and i.target == "bayesian" for i in imports())


def test_modules_do_not_import_in_circles():
    found = circles()
    assert not found, listed([" ".join(circle) for circle in found])


def test_imports_go_down():
    wrong = []
    for found in imports():
        own, other = layer_of(found.source), layer_of(found.target)
        if other > own or (other[0] == own[0] and own != other):
            wrong.append(str(found))
    assert not wrong, listed(wrong)


def test_every_module_has_a_layer():
    missing = [module for module in modules() if layer_of(module)[1] == "" and module != "io"]
    assert not missing, listed(missing)
    unknown = [entry for layer in LAYERS for entry in layer.split() if entry not in ("bayeslim", *modules())]
    assert not unknown, listed(unknown)


def test_only_optional_modules_are_imported_inside_functions():
    wrong = [str(found) for found in imports() if found.is_deferred and not needs_an_extra(found.target)]
    assert not wrong, listed(wrong)


def test_private_names_stay_in_their_module():
    private = [found for found in imports() if found.name.startswith("_") and not found.name.startswith("__")]
    assert not private, listed([f"{found}.{found.name}" for found in private])


def test_few_files_are_at_the_root():
    files = sorted(path.name for path in ROOT.glob("*.py"))
    assert len(files) <= MAX_FILES_AT_THE_ROOT, listed(files)


@pytest.mark.parametrize("folder", sorted({path.parent for path in ROOT.rglob("*.py")} - {ROOT}), ids=lambda p: p.name)
def test_every_folder_says_what_lives_there(folder):
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    first = docstring.split("\n")[0]
    assert len(first) > 15, "the docstring needs a sentence"
    assert len(first) <= 120
