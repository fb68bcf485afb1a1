"""What modules hold besides numbers: whether it is still the same, and putting it back."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import nn

_CONTAINERS = (dict, OrderedDict, list, set)
_TENSORS = ("_parameters", "_buffers")
_UNSEEN = (vars(nn.Module()).keys() - {"_modules", "_forward_hooks", "_forward_pre_hooks"}) | set(_TENSORS)
"""What torch keeps in every module that has no part in how it is called, or is a tensor."""


class Belongings:
    """The attributes of modules, and what is in those that are lists, dictionaries or sets.

    Args:
        modules: whose.
        seen: only what has a part in how they are called, without which tensors these have.
    """

    def __init__(self, modules: Iterable[nn.Module], seen: bool = False):
        held: list[Any] = []
        for module in modules:
            own = vars(module)
            skipped = _UNSEEN if seen else ()
            held.append(own)
            held += [v for name, v in own.items() if type(v) in _CONTAINERS and name not in skipped]
        self.held = [(things, copy.copy(things)) for things in held]

    def are_left(self) -> bool:
        """Whether they hold the very same."""
        return all(
            len(things) == len(before) and all(map(is_, _values(things), _values(before)))
            for things, before in self.held
        )

    def put_back(self) -> None:
        """Let them hold that again."""
        for things, before in self.held:
            things.clear()
            (things.extend if isinstance(things, list) else things.update)(before)


def _values(things: Any) -> Iterable[Any]:
    if isinstance(things, dict):
        return things.values()
    return sorted(things, key=id) if isinstance(things, set) else things  # a copy may have another order
