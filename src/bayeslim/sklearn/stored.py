"""A fitted network as bytes: the files of `bl.save`, by name, for the pickle of an estimator.

`pickle` writes whatever an object holds, and runs code when it reads. The network is therefore held as the content of
safetensors and JSON files, which `bl.load` checks and reads without pickle.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import CorruptFile
from bayeslim.io.saving import load, save


def to_files(bnn: Bayesian) -> dict[str, bytes]:
    """Save a network, and return the content of its files by name."""
    with tempfile.TemporaryDirectory() as folder:
        save(bnn, folder)
        files = sorted(Path(folder).iterdir())
        return {file.name: file.read_bytes() for file in files if file.suffix in (".json", ".safetensors")}


def from_files(files: Mapping[str, bytes], model: nn.Module) -> Bayesian:
    """Load a network from the content of its files.

    Args:
        files: from `to_files`.
        model: a network of the same architecture.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            if Path(name).name != name:
                raise CorruptFile(f"The stored network names a file in another folder: {name!r}.")
            (Path(folder) / name).write_bytes(content)
        bnn: Bayesian = load(folder, model)
        return bnn
