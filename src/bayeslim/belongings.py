"""What modules hold besides numbers, and what their code reads elsewhere: whether it is the same, and putting it back.

A forward may read anything: attributes, objects in them (settings, say), attributes of its class, global variables, and
what a function has enclosed. What can be reached is looked at by identity, which takes a microsecond or two; classes
and variables of installed packages are not, as nobody changes these.
"""

from __future__ import annotations

import dis
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

_CONTAINERS = (dict, OrderedDict, list, set)
_TENSORS = ("_parameters", "_buffers")
_UNSEEN = (vars(nn.Module()).keys() - {"_modules", "_forward_hooks", "_forward_pre_hooks"}) | set(_TENSORS)
"""What torch keeps in every module that has no part in how it is called, or is a tensor."""
_CONSTANT = (int, float, complex, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device, nn.Module)
MANY = 2**11
"""How many values besides those of modules are looked at; where there are more, not all can be known."""
_OPAQUE = frozenset({*sys.stdlib_module_names, "torch", "numpy", "scipy"})
"""Packages whose objects have nothing to look into but for the plainest of them."""
_NOTHING = object()


class Belongings:
    """The attributes of modules, and what is in those that are lists, dictionaries, sets or objects.

    Args:
        modules: whose.
        seen: only what has a part in how they are called, without which tensors these have, but with what their code
            reads besides.
    """

    def __init__(self, modules: Iterable[nn.Module], seen: bool = False):
        skipped = _UNSEEN if seen else ()
        held: list[Any] = []
        reached = _Reached(code=seen)
        for module in modules:
            own = vars(module)
            held.append(own)
            held += [v for name, v in own.items() if type(v) in _CONTAINERS and name not in skipped]
            if not type(module).__module__.startswith("torch."):
                reached.add(value for name, value in own.items() if name not in _UNSEEN and name != "_modules")
                reached.add([type(module)])
        known = {*map(id, held)}
        held += [things for things in reached.held if id(things) not in known]
        self.held, self.read, self.named, self.cells = held, reached.read, reached.named, reached.cells
        self.are_known = reached.are_known
        self.before = [_copied(things) for things in held]
        self.contents = [*map(_values_of, held), *(things.values() for things in self.read)]  # as these are at any time
        self.sizes = [*map(len, self.contents)]
        self.values = [*self._values()]

    def are_left(self) -> bool:
        """Whether they hold the very same; this takes a while of many a prediction."""
        return self.sizes == [*map(len, self.contents)] and all(map(is_, self._values(), self.values))

    def put_back(self) -> None:
        """Let them hold that again."""
        for things, before in zip(self.held, self.before, strict=True):
            if not _are_same(things, before):
                things.clear()
                (things.extend if isinstance(things, list) else things.update)(before)

    def _values(self) -> Iterable[Any]:
        values = chain.from_iterable(self.contents)
        if not (self.named or self.cells):
            return values
        return chain(values, [things.get(name, _NOTHING) for things, name in self.named], map(_content, self.cells))


def _values_of(things: Any) -> Collection[Any]:
    return things.values() if isinstance(things, dict) else things


def _are_same(things: Any, before: Any) -> bool:
    if len(things) != len(before) or (isinstance(things, dict) and [*things] != [*before]):
        return False
    return all(map(is_, _values_of(things), _values_of(before)))


def _copied(things: Any) -> Any:
    return dict(things) if isinstance(things, dict) else list(things) if isinstance(things, list) else set(things)


class _Reached:
    """What can be reached from values.

    Args:
        code: whether functions and classes are looked into, too.

    Attributes:
        are_known: whether changes of all of it would be seen.
        held: dictionaries, lists and sets, also those of attributes.
        read: attributes of classes.
        named: variables of modules, and attributes of what is imported: where they are, and their names.
        cells: what functions have enclosed.
    """

    def __init__(self, code: bool):
        self.code = code
        self.held: list[Any] = []
        self.read: list[Mapping[str, Any]] = []
        self.named: list[tuple[Mapping[str, Any], str]] = []
        self.cells: list[CellType] = []
        self.are_known = True
        self._known: dict[int, Any] = {}  # the values themselves, as others may get their numbers otherwise
        self._count = 0

    def add(self, values: Iterable[Any]) -> None:
        """Look at values, and at whatever these lead to."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, _CONSTANT) or id(value) in self._known:
                continue
            self._known[id(value)] = value
            self._count += 1
            if self._count > MANY:
                self.are_known = False
                return
            waiting += self._next(value)

    def _next(self, value: Any) -> list[Any]:
        if isinstance(value, (tuple, frozenset)):
            return list(value)
        if isinstance(value, _CONTAINERS):
            self.held.append(value)
            return list(_values_of(value))
        if isinstance(value, partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, (staticmethod, classmethod)):
            return [value.__func__]
        if isinstance(value, property):
            return [value.fget]
        if isinstance(value, FunctionType):
            return list(self._of_function(value)) if self.code and not _is_others(value) else []
        if isinstance(value, type):
            return list(self._of_class(value)) if self.code and not _is_others(value) else []
        kind = type(value)
        if isinstance(value, ModuleType) or (_package_of(kind) in _OPAQUE and kind not in (SimpleNamespace, Namespace)):
            return []
        if type(own := getattr(value, "__dict__", None)) is dict:
            self.held.append(own)
            return [kind, *own.values()]
        if any(vars(parent).get("__slots__") for parent in kind.__mro__):
            self.are_known = False  # these are attributes that no dictionary has
        return [kind]

    def _of_class(self, kind: type) -> Iterator[Any]:
        for parent in kind.__mro__:
            if not _is_others(parent):
                self.read.append(vars(parent))
                yield from vars(parent).values()

    def _of_function(self, function: FunctionType) -> Iterator[Any]:
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        for cell in function.__closure__ or ():
            if not isinstance(content := _content(cell), (nn.Module, type)):
                self.cells.append(cell)
            yield content
        everywhere = function.__globals__
        read, attributes = _names_in(function.__code__)
        for name in read & everywhere.keys():
            value = everywhere[name]
            if isinstance(value, ModuleType):
                if not _is_others(value):
                    yield from self._named(vars(value), attributes)
            else:
                yield from self._named(everywhere, [name])

    def _named(self, things: Mapping[str, Any], names: Iterable[str]) -> Iterator[Any]:
        for name in names:
            value = things.get(name, _NOTHING)
            if value is not _NOTHING and not isinstance(value, nn.Module):
                self.named.append((things, name))
                yield value


def _names_in(code: CodeType) -> tuple[set[str], set[str]]:
    """Names of variables that code reads outside of itself, and of attributes, also in functions within it."""
    variables, attributes = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables.add(str(step.argval))
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(str(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            within = _names_in(constant)
            variables |= within[0]
            attributes |= within[1]
    return variables, attributes


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _NOTHING


def _package_of(thing: Any) -> str:
    name = thing.__name__ if isinstance(thing, ModuleType) else (getattr(thing, "__module__", None) or "")
    return str(name).partition(".")[0]


def _is_others(thing: Any) -> bool:
    """Whether a module, class or function is of Python, this package or an installed one: nobody changes these."""
    package = _package_of(thing)
    if package in _OPAQUE or package == __package__:
        return True
    if package == "__main__":  # a notebook's may have the file of what runs it
        return False
    home = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in home or "dist-packages" in home
