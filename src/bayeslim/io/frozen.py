"""Frozen parameters that a file leaves out: those of the base network under an adapter.

The file names them and holds a hash of their values. A network that is loaded takes them from the model it is given. A
model with other values gives a warning: the posterior belongs to the values it was fitted with.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from bayeslim.errors import BayeslimError, BayeslimWarning, CorruptFile
from bayeslim.io.digest import digest
from bayeslim.types import Params


def frozen_names(model: nn.Module) -> list[str]:
    """List all names of the parameters that do not train, tied ones under each name."""
    return sorted(name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad)


def describe_frozen(model: nn.Module) -> dict[str, Any]:
    """Name and hash the frozen parameters of a model, as a part of a file."""
    names = frozen_names(model)
    return {"names": names, "sha256": _hash(model.state_dict(), names)}


def take_frozen(entry: Any, model: nn.Module | None) -> Params:
    """Take the frozen tensors that a file leaves out from the model.

    The entry is that of `describe_frozen`; None for a file that leaves nothing out.
    """
    if entry is None:
        return {}
    if model is None:
        raise BayeslimError("The file leaves out the frozen parameters. Pass the model: load(path, model=network).")
    names = entry.get("names") if isinstance(entry, dict) else None
    own = model.state_dict()
    if not isinstance(names, list) or not all(isinstance(name, str) and name in own for name in names):
        raise CorruptFile(f"The file leaves out frozen parameters that {type(model).__name__} does not have.")
    if entry.get("sha256") != _hash(own, names):
        warnings.warn(
            f"The frozen parameters of this {type(model).__name__} are not those that the posterior was saved with. "
            "Load the same base network in the same precision.",
            BayeslimWarning,
            stacklevel=4,
        )
    return {name: own[name] for name in names}


def _hash(tensors: Mapping[str, Tensor], names: Iterable[str]) -> str:
    return digest(part for name in sorted(names) for part in (name, tensors[name]))
