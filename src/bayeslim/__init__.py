"""bayeslim: make any PyTorch network Bayesian, read its uncertainty, prune it by its posterior.

bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical())
bnn.fit(loader, epochs=20)
prediction = bl.predict(bnn, x)
bl.save(bnn, "network/")
"""

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from bayeslim.io.registry import load_with
from bayeslim.version import __version__ as __version__


def _homes() -> dict[str, str]:
    """Read where public names live from `__init__.pyi`, as type checkers do."""
    statements = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    imports = [found for found in statements if isinstance(found, ast.ImportFrom)]
    return {alias.name: str(found.module) for found in imports for alias in found.names}


_HOMES = _homes()
__all__ = sorted(_HOMES.keys() - {"__version__"})


class _Package(ModuleType):
    """The package, in which a public function keeps its name when a folder of that name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and _HOMES.get(name, __name__) != __name__):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: importing all of them takes time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    found = vars(importlib.import_module(home)).get(name)
    found = importlib.import_module(f"{home}.{name}") if found is None else found
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _import_everything() -> None:
    for name in __all__:
        __getattr__(name)


sys.modules[__name__].__class__ = _Package
load_with(_import_everything)
