"""What modules hold besides numbers: whether it is still the same, and putting it back."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
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
        skipped = _UNSEEN if seen else ()
        held: list[Any] = []
        for module in modules:
            own = vars(module)
            held.append(own)
            held += [v for name, v in own.items() if type(v) in _CONTAINERS and name not in skipped]
        self.held = held
        self.before = [copy.copy(things) for things in held]
        self.sizes = [*map(len, held)]
        self.values = [*_values_of(held)]

    def are_left(self) -> bool:
        """Whether they hold the very same."""
        return self.sizes == [*map(len, self.held)] and all(map(is_, _values_of(self.held), self.values))

    def put_back(self) -> None:
        """Let them hold that again."""
        for things, before in zip(self.held, self.before, strict=True):
            things.clear()
            (things.extend if isinstance(things, list) else things.update)(before)


def _values_of(held: Iterable[Any]) -> Iterable[Any]:
    """All that is in dictionaries, lists and sets; this takes a while of many a prediction."""
    return chain.from_iterable([things.values() if isinstance(things, dict) else things for things in held if things])
