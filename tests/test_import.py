"""Importing the library imports nothing optional, and most of the library at its first use."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

import pytest
from torch import nn

import bayeslim as bl

OPTIONAL = ["matplotlib", "rich", "typer", "onnx", "onnxruntime", "onnxscript", "jinja2", "scipy", "sklearn", "pandas"]

SCRIPT = """
import json, sys
import torch
model = torch.nn.Linear(2, 2)
before = torch.get_rng_state()
import bayeslim
own = [name for name in sys.modules if name.startswith("bayeslim.")]
import bayeslim.prune.plan, bayeslim.predict.predict
kinds = {name: type(getattr(bayeslim, name)).__name__ for name in ("prune", "predict")}
method = type(bayeslim.load(sys.argv[1], model).method).__name__
import bayeslim.app.compress
for name in bayeslim.__all__:
    getattr(bayeslim, name)
loaded = sorted({name.split(".")[0] for name in sys.modules})
same = torch.equal(before, torch.get_rng_state())
print(json.dumps({"own": own, "kinds": kinds, "method": method, "loaded": loaded, "same": same}))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Import the library in a fresh process, load a network, and look at every public name."""
    folder = tmp_path_factory.mktemp("saved") / "network"
    bl.save(bl.bayesianize(nn.Linear(2, 2), bl.Variational(), likelihood=bl.likelihoods.Categorical()), folder)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], check=True, capture_output=True, text=True, timeout=120
    )
    return json.loads(run.stdout)


def test_nothing_optional_is_imported(imported):
    assert "torch" in imported["loaded"]
    assert not set(OPTIONAL) & set(imported["loaded"])


def test_importing_leaves_the_random_state_alone(imported):
    assert imported["same"]


def test_the_library_is_imported_at_its_first_use(imported):
    assert set(imported["own"]) <= {"bayeslim.errors", "bayeslim.io", "bayeslim.io.registry", "bayeslim.version"}


def test_a_folder_does_not_take_the_name_of_a_function(imported):
    assert imported["kinds"] == {"prune": "function", "predict": "function"}


def test_loading_imports_what_a_file_names(imported):
    assert imported["method"] == "Variational"


def test_public_names_are_listed_and_others_refused():
    assert set(bl.__all__) <= set(dir(bl))
    assert isinstance(bl.families, ModuleType)
    with pytest.raises(AttributeError, match=r"'bayeslim' has no attribute 'nothing'"):
        _ = bl.nothing
